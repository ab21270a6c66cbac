#include "chorale/report/series.h"

#include <algorithm>
#include <cmath>

#include "chorale/base/error.h"

namespace chorale::report {
namespace {

double mean_of(std::span<const double> values) {
  double sum = 0;
  size_t count = 0;
  for (double value : values) {
    if (std::isnan(value)) continue;
    sum += value;
    ++count;
  }
  return count > 0 ? sum / static_cast<double>(count) : kMissing;
}

// fmin and fmax prefer a number to NaN.
double low_of(std::span<const double> values) {
  double low = kMissing;
  for (double value : values) low = std::fmin(low, value);
  return low;
}
double high_of(std::span<const double> values) {
  double high = kMissing;
  for (double value : values) high = std::fmax(high, value);
  return high;
}

}  // namespace

Series::Series(std::span<const std::string_view> names) {
  CHORALE_INVARIANT(!names.empty(), "a series without a step");
  for (std::string_view name : names) columns_.push_back({name, {}});
}

void Series::add(std::span<const double> row) {
  CHORALE_INVARIANT(row.size() == columns_.size(), "a row of ", row.size(), " in ", columns_.size(), " columns");
  const std::vector<double>& steps = columns_.front().values;
  if (!steps.empty() && row.front() <= steps.back()) {
    const auto kept = std::lower_bound(steps.begin(), steps.end(), row.front()) - steps.begin();
    for (Column& column : columns_) column.values.resize(static_cast<size_t>(kept));
  }
  for (size_t i = 0; i < row.size(); ++i) columns_[i].values.push_back(row[i]);
}

Series Series::thinned(size_t limit, std::string_view of, std::string_view low, std::string_view high) const {
  if (rows() <= limit) return *this;
  std::vector<std::string_view> names;
  for (const Column& column : columns_) names.push_back(column.name);
  names.insert(names.end(), {low, high});
  Series result(names);
  const size_t width = (rows() + limit - 1) / limit;
  std::vector<double> row;
  for (size_t first = 0; first < rows(); first += width) {
    const size_t count = std::min(width, rows() - first);
    row.clear();
    double lowest = kMissing, highest = kMissing;
    for (const Column& column : columns_) {
      const auto values = std::span(column.values).subspan(first, count);
      row.push_back(&column == &columns_.front() ? values.back() : mean_of(values));
      if (column.name != of) continue;
      lowest = low_of(values);
      highest = high_of(values);
    }
    row.insert(row.end(), {lowest, highest});
    result.add(row);
  }
  return result;
}

}  // namespace chorale::report

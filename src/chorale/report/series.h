// Numbers that grow by a row with each line of a log.
#pragma once

#include <cstddef>
#include <limits>
#include <span>
#include <string_view>
#include <vector>

namespace chorale::report {

constexpr double kMissing = std::numeric_limits<double>::quiet_NaN();

struct Column {
  std::string_view name;  // of a constant
  std::vector<double> values;
};

// Columns of one length, the first of which is the step. A value that a line did not have, and a loss that is not a
// number, are NaN.
class Series {
 public:
  explicit Series(std::span<const std::string_view> names);

  // Rows of steps from this one on go away first: a run that was resumed does them again.
  void add(std::span<const double> row);

  size_t rows() const { return columns_.front().values.size(); }
  const std::vector<Column>& columns() const { return columns_; }

  // Has at most `rows` rows, each the mean of as many neighbours as needed (of the step: their last), since nobody sees
  // a million points and a page should not carry them. The columns `low` and `high` get the extremes of column `of`, so
  // that a spike stays visible.
  Series thinned(size_t rows, std::string_view of, std::string_view low, std::string_view high) const;

 private:
  std::vector<Column> columns_;
};

}  // namespace chorale::report

// einsum as a composite: every pair of operands becomes one batched matrix product.
#include <algorithm>
#include <array>
#include <string>

#include "chorale/base/error.h"
#include "chorale/op/need_defined.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/product.h"
#include "chorale/op/reduce.h"
#include "chorale/op/view.h"

namespace chorale {
namespace {

// A tensor whose dimensions have names, each at most once.
struct Named {
  Tensor tensor;
  std::string labels;
};

// Names for the dimensions behind "...", aligned from the right: the letters of equations cannot clash with digits.
constexpr std::string_view kEllipsisLabels = "01234567";

// Something for each label; labels are letters and digits.
template <class T>
using PerLabel = std::array<T, 128>;
size_t place(char label) { return static_cast<size_t>(label) % 128; }

std::string spell_out(std::string_view equation, const std::string& labels, int64_t dims) {
  const size_t dots = labels.find("...");
  if (dots == std::string::npos) return labels;
  const int64_t hidden = dims - (static_cast<int64_t>(labels.size()) - 3);
  CHORALE_CHECK(hidden >= 0, "[einsum] '", labels, "' in '", equation, "' names more dimensions than the operand's ",
                dims);
  std::string result = labels;
  return result.replace(dots, 3, kEllipsisLabels.substr(kEllipsisLabels.size() - static_cast<size_t>(hidden)));
}

std::vector<std::string> split(std::string_view text) {
  std::vector<std::string> parts(1);
  for (char c : text) {
    if (c == ' ') continue;
    if (c == ',') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

bool has(const std::string& labels, char label) { return labels.find(label) != std::string::npos; }

// A letter twice in one operand: its diagonal.
Named take_diagonals(Named x) {
  for (size_t i = 0; i < x.labels.size(); ++i) {
    const size_t again = x.labels.find(x.labels[i], i + 1);
    if (again == std::string::npos) continue;
    const char label = x.labels[i];
    x.tensor =
        diagonal(x.tensor, 0, static_cast<int64_t>(i), static_cast<int64_t>(again));  // becomes the last dimension
    x.labels.erase(again, 1);
    x.labels.erase(i, 1);
    x.labels += label;
    return take_diagonals(std::move(x));
  }
  return x;
}

Named sum_away(Named x, const std::string& keep) {
  std::vector<int64_t> dims;
  std::string rest;
  for (size_t i = 0; i < x.labels.size(); ++i) {
    if (has(keep, x.labels[i])) {
      rest += x.labels[i];
    } else {
      dims.push_back(static_cast<int64_t>(i));
    }
  }
  if (dims.empty()) return x;
  return {sum(x.tensor, dims), rest};
}

Tensor arrange(const Named& x, const std::string& order) {
  std::vector<int64_t> dims;
  for (char label : order) dims.push_back(static_cast<int64_t>(x.labels.find(label)));
  return permute(x.tensor, dims);
}

// a and b combined; letters that neither the result nor later operands need are summed.
Named combine(Named a, Named b, const std::string& keep) {
  a = sum_away(std::move(a), keep + b.labels);
  b = sum_away(std::move(b), keep + a.labels);
  std::string batch, rows, inner, columns;
  for (char label : a.labels) {
    if (!has(b.labels, label)) {
      rows += label;
    } else {
      (has(keep, label) ? batch : inner) += label;
    }
  }
  for (char label : b.labels) {
    if (!has(a.labels, label)) columns += label;
  }
  PerLabel<int64_t> sizes{};
  const auto note = [&](const Named& x) {
    for (size_t i = 0; i < x.labels.size(); ++i) {
      int64_t& size = sizes[place(x.labels[i])];
      const int64_t found = x.tensor.sizes()[i];
      size = size == 0 || size == 1 ? found : size;
    }
  };
  note(a);
  note(b);
  const auto product = [&](const std::string& labels) {
    int64_t count = 1;
    for (char label : labels) count *= sizes[place(label)];
    return count;
  };
  const auto shape = [&](const std::string& labels) {
    Shape result;
    for (char label : labels) result.push_back(sizes[place(label)]);
    return result;
  };
  // An operand whose dimension is 1 where the other's is not is broadcast first.
  const auto matrix = [&](const Named& x, const std::string& outer, const std::string& first,
                          const std::string& second) {
    const std::string labels = outer + first + second;
    Tensor y = labels == x.labels ? x.tensor : arrange(x, labels);
    if (const Shape full = shape(labels); y.sizes() != full) y = expand(y, full);
    return reshape(y, {product(outer), product(first), product(second)});
  };
  const Tensor c = bmm(matrix(a, batch, rows, inner), matrix(b, batch, inner, columns));
  const std::string labels = batch + rows + columns;
  return {reshape(c, shape(labels)), labels};
}

}  // namespace

Tensor einsum(std::string_view equation, const std::vector<Tensor>& operands) {
  const size_t arrow = equation.find("->");
  std::vector<std::string> inputs = split(equation.substr(0, arrow));
  CHORALE_CHECK(!operands.empty() && inputs.size() == operands.size(), "[einsum] '", equation, "' has ", inputs.size(),
                " operands, ", operands.size(), " were given");
  for (const Tensor& operand : operands) op::need_defined("einsum", "an operand", operand);
  for (char c : equation) {
    CHORALE_CHECK(
        std::isalpha(static_cast<unsigned char>(c)) || std::string_view(" ,.->").find(c) != std::string_view::npos,
        "[einsum] '", c, "' in '", equation, "' is no letter");
  }
  PerLabel<int64_t> sizes{};
  PerLabel<int> occurrences{};
  for (size_t i = 0; i < inputs.size(); ++i) {
    inputs[i] = spell_out(equation, inputs[i], operands[i].dims());
    CHORALE_CHECK(static_cast<int64_t>(inputs[i].size()) == operands[i].dims(), "[einsum] '", inputs[i], "' in '",
                  equation, "' does not fit an operand of shape ", operands[i].sizes());
    for (size_t d = 0; d < inputs[i].size(); ++d) {
      const char label = inputs[i][d];
      CHORALE_CHECK(label != '.', "[einsum] dots in '", equation, "' come in threes");
      int64_t& known = sizes[place(label)];
      const int64_t size = operands[i].sizes()[d];
      const bool fresh = occurrences[place(label)]++ == 0;
      CHORALE_CHECK(fresh || known == size || size == 1 || known == 1, "[einsum] '", label, "' in '", equation,
                    "' is both ", known, " and ", size);
      known = fresh ? size : std::max(known, size);
    }
  }
  std::string result, hidden;
  for (size_t at = 0; at < occurrences.size(); ++at) {
    const auto label = static_cast<char>(at);
    if (occurrences[at] > 0 && kEllipsisLabels.find(label) != std::string_view::npos) {
      hidden += label;
    } else if (arrow == std::string_view::npos && occurrences[at] == 1) {
      result += label;
    }
  }
  if (arrow == std::string_view::npos) {
    result = hidden + result;
  } else {
    const std::string written = split(equation.substr(arrow + 2))[0];
    const int64_t named = static_cast<int64_t>(written.size()) - (written.find("...") == std::string::npos ? 0 : 3);
    result = spell_out(equation, written, named + static_cast<int64_t>(hidden.size()));
  }
  for (char label : result) {
    CHORALE_CHECK(occurrences[place(label)] > 0 && std::count(result.begin(), result.end(), label) == 1, "[einsum] '",
                  label, "' of the result of '", equation, "' must occur in an operand, and once in the result");
  }
  Named total = take_diagonals({operands[0], inputs[0]});
  for (size_t i = 1; i < operands.size(); ++i) {
    std::string keep = result;
    for (size_t later = i + 1; later < inputs.size(); ++later) keep += inputs[later];
    total = combine(std::move(total), take_diagonals({operands[i], inputs[i]}), keep);
  }
  return arrange(sum_away(std::move(total), result), result);
}

}  // namespace chorale

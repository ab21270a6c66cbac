// Tensors as text for people. The elements to show are picked first; then one format is found that suits them all; then
// they are laid out in columns.
#include <algorithm>
#include <cmath>
#include <complex>
#include <cstdio>
#include <ostream>
#include <string>
#include <vector>

#include "chorale/tensor/tensor.h"

namespace chorale {
namespace {

constexpr const char* kEllipsis = "…";

// How many columns a text takes: UTF-8 continuation bytes take none.
size_t columns(const std::string& text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

// Which indices of a dimension are shown: all of them, or some at either end.
struct Selection {
  int64_t size = 0, edge = 0;
  bool cut() const { return edge > 0; }
  int64_t shown() const { return cut() ? 2 * edge : size; }
  int64_t index(int64_t i) const { return cut() && i >= edge ? size - 2 * edge + i : i; }
};

// One text per number, all with the same number of decimals and as few of them as show every number to `precision`
// digits after the point: 1. 2.; 0.5 1.0; 0.125 1.000. Scientific where fixed decimals would hide small numbers or
// drown large ones.
std::vector<std::string> format_numbers(const std::vector<double>& numbers, int precision) {
  precision = std::clamp(precision, 0, 17);  // a double has no more
  double smallest = HUGE_VAL, largest = 0;   // magnitudes of what is neither zero nor infinite
  bool whole = true;
  for (const double number : numbers) {
    if (!std::isfinite(number) || number == 0) continue;
    smallest = std::min(smallest, std::abs(number));
    largest = std::max(largest, std::abs(number));
    whole &= number == std::trunc(number);
  }
  // 0.0001 in f32 lies a little below the bound and is fine.
  const double bound = 0.999 * std::pow(10.0, -precision);
  const bool scientific = whole ? largest >= 1e8 : largest >= 1e6 || smallest < bound;
  const auto render = [&](double number, int decimals) -> std::string {
    if (std::isnan(number)) return "nan";
    if (std::isinf(number)) return number > 0 ? "inf" : "-inf";
    char text[400];  // the largest double has 309 digits
    std::snprintf(text, sizeof(text), scientific ? "%#.*e" : "%#.*f", decimals, number);
    return text;
  };
  // Zeros at the end of the decimals are needed only where another number has a digit.
  int decimals = scientific ? std::min(1, precision) : 0;
  if (scientific || !whole) {
    for (const double number : numbers) {
      if (!std::isfinite(number)) continue;
      const std::string text = render(number, precision);
      const size_t point = text.find('.');
      const std::string digits = text.substr(point + 1, static_cast<size_t>(precision));
      decimals = std::max(decimals, static_cast<int>(digits.find_last_not_of('0') + 1));
    }
  }
  std::vector<std::string> texts;
  texts.reserve(numbers.size());
  for (const double number : numbers) texts.push_back(render(number, decimals));
  return texts;
}

std::vector<std::string> format_complex(const std::vector<complex128>& numbers, int precision) {
  std::vector<double> reals, imags;
  for (const complex128& number : numbers) {
    reals.push_back(number.real());
    imags.push_back(std::abs(number.imag()));
  }
  const std::vector<std::string> left = format_numbers(reals, precision), right = format_numbers(imags, precision);
  std::vector<std::string> texts;
  for (size_t i = 0; i < numbers.size(); ++i) {
    const bool negative = std::signbit(numbers[i].imag()) && !std::isnan(numbers[i].imag());
    texts.push_back(left[i] + (negative ? '-' : '+') + right[i] + 'j');
  }
  return texts;
}

class Printer {
 public:
  Printer(const Tensor& tensor, const PrintOptions& options) : tensor_(tensor), options_(options) {
    const bool cut = tensor.elems() > options.threshold;
    const int64_t edge = std::max<int64_t>(options.edge, 1);
    // Where one element alone would be left out, it is shown: the ellipsis takes no less room.
    for (const int64_t size : tensor.sizes()) selections_.push_back({size, cut && size > 2 * edge + 1 ? edge : 0});
    collect(0, 0);
    format();
    for (const std::string& cell : cells_) width_ = std::max(width_, columns(cell));
  }

  // `indent` is the column of the first bracket.
  std::string text(size_t indent) {
    if (tensor_.elems() == 0) return "[]";
    std::string out;
    lay_out(0, indent, out);
    return out;
  }
  // False when elements were left out.
  bool complete() const {
    return std::none_of(selections_.begin(), selections_.end(), [](const Selection& s) { return s.cut(); });
  }

 private:
  void collect(size_t dim, int64_t offset) {
    if (dim == selections_.size()) {
      offsets_.push_back(offset);
      return;
    }
    const Selection& selection = selections_[dim];
    for (int64_t i = 0; i < selection.shown(); ++i) {
      collect(dim + 1, offset + selection.index(i) * tensor_.strides()[dim]);
    }
  }

  template <class To>
  std::vector<To> values() const {
    std::vector<To> result;
    const int64_t origin = tensor_.offset();
    for (const int64_t offset : offsets_) result.push_back(tensor_.view_as({}, {}, origin + offset).item<To>());
    return result;
  }

  void format() {
    const DType dtype = tensor_.dtype();
    if (is_complex(dtype)) {
      cells_ = format_complex(values<complex128>(), options_.precision);
    } else if (is_floating(dtype)) {
      cells_ = format_numbers(values<double>(), options_.precision);
    } else {
      for (const int64_t value : values<int64_t>()) {
        cells_.push_back(dtype == DType::kBool ? (value ? "true" : "false") : std::to_string(value));
      }
    }
  }

  std::string next_cell() {
    const std::string& cell = cells_[next_++];
    return tensor_.dims() == 0 ? cell : std::string(width_ - columns(cell), ' ') + cell;
  }

  void lay_out(size_t dim, size_t indent, std::string& out) {
    if (dim == selections_.size()) {
      out += next_cell();
      return;
    }
    const Selection& selection = selections_[dim];
    out += '[';
    if (dim + 1 == selections_.size()) {
      lay_out_row(selection, indent + 1, out);
    } else {
      // Matrices stand apart by an empty line, stacks of them by two.
      const std::string next_line =
          ',' + std::string(selections_.size() - dim - 1, '\n') + std::string(indent + 1, ' ');
      for (int64_t i = 0; i < selection.shown(); ++i) {
        if (i > 0) out += next_line;
        if (selection.cut() && i == selection.edge) out += kEllipsis + next_line;
        lay_out(dim + 1, indent + 1, out);
      }
    }
    out += ']';
  }

  void lay_out_row(const Selection& selection, size_t indent, std::string& out) {
    // A row too long for a line goes on below its first element.
    size_t column = indent;
    const auto place = [&](const std::string& cell, bool first) {
      const size_t needed = columns(cell) + 2;
      if (!first) {
        out += ',';
        if (column + needed > static_cast<size_t>(std::max(options_.line_width, 0))) {
          out += '\n' + std::string(indent, ' ');
          column = indent;
        } else {
          out += ' ';
        }
      }
      out += cell;
      column += needed;
    };
    for (int64_t i = 0; i < selection.shown(); ++i) {
      if (selection.cut() && i == selection.edge) place(kEllipsis, false);
      place(next_cell(), i == 0);
    }
  }

  const Tensor& tensor_;
  const PrintOptions& options_;
  std::vector<Selection> selections_;
  std::vector<int64_t> offsets_;
  std::vector<std::string> cells_;  // texts of the elements shown, in row-major order
  size_t next_ = 0;
  size_t width_ = 0;
};

std::string type_of(const Tensor& tensor) { return concat(tensor.dtype(), tensor.sizes()); }

std::string dense_text(const Tensor& tensor, const PrintOptions& options, size_t indent) {
  Printer printer(tensor, options);
  std::string text = printer.text(indent);
  // The brackets show the shape and the digits the kind, unless something is missing or the width is not the usual one.
  const DType dtype = tensor.dtype();
  const bool usual = dtype == DType::kF32 || dtype == DType::kI64 || dtype == DType::kBool || dtype == DType::kC64;
  if (!usual || !printer.complete() || tensor.elems() == 0) text += "  " + type_of(tensor);
  return text;
}

std::string sparse_text(const Tensor& tensor, const PrintOptions& options) {
  const SparseParts& parts = tensor.sparse();
  const int64_t entries = parts.indices.size(1);
  std::string text = concat("sparse ", type_of(tensor), ", ", entries, entries == 1 ? " entry" : " entries",
                            parts.coalesced ? ", coalesced" : "");
  constexpr const char* kIndices = "\n  indices  ";
  constexpr const char* kValues = "\n  values   ";
  constexpr size_t kIndent = 11;
  if (tensor.device().type != DeviceType::kCpu) return text + concat(" on ", tensor.device());
  return text + kIndices + dense_text(parts.indices, options, kIndent) + kValues +
         dense_text(parts.values, options, kIndent);
}

}  // namespace

std::string to_string(const Tensor& tensor, const PrintOptions& options) {
  if (!tensor.defined()) return "undefined";
  if (tensor.is_sparse()) return sparse_text(tensor, options);
  if (tensor.is_sharded()) return tensor.extension()->why_no_bytes(tensor);
  if (tensor.device().type != DeviceType::kCpu) {
    const char* why = tensor.device().type == DeviceType::kNull ? ", no data" : ", not readable from here";
    return concat(type_of(tensor), " on ", tensor.device(), why);
  }
  if (tensor.extension()) tensor.need_bytes("printing");
  return dense_text(tensor, options, 0);
}

std::ostream& operator<<(std::ostream& out, const Tensor& tensor) { return out << to_string(tensor); }

}  // namespace chorale

// Some of the inputs (or results) of an op, by position: a set in four bytes that is copied and asked without a branch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace chorale::op {

// Lists of tensors (concat, stack) have any number of inputs, so positions from kLast on share one bit: such a set has
// all of them or none.
class InputSet {
 public:
  static constexpr size_t kLast = 31;

  constexpr InputSet() = default;
  constexpr InputSet(std::initializer_list<size_t> positions) {
    for (const size_t i : positions) add(i);
  }
  static constexpr InputSet all() { return from(0); }
  // Position `first` and everything behind it.
  static constexpr InputSet from(size_t first) {
    InputSet set;
    set.bits_ = ~uint32_t{0} << bit(first);
    return set;
  }

  constexpr bool has(size_t i) const { return bits_ >> bit(i) & 1u; }
  constexpr bool empty() const { return bits_ == 0; }
  constexpr void add(size_t i) { bits_ |= uint32_t{1} << bit(i); }
  constexpr friend InputSet operator|(InputSet a, InputSet b) {
    InputSet both;
    both.bits_ = a.bits_ | b.bits_;
    return both;
  }
  constexpr friend bool operator==(InputSet, InputSet) = default;

 private:
  static constexpr size_t bit(size_t i) { return i < kLast ? i : kLast; }

  uint32_t bits_ = 0;
};
static_assert(sizeof(InputSet) == 4);

}  // namespace chorale::op

#include "chorale/rpc/control_numbers.h"

namespace chorale::rpc {

uint64_t ControlNumbers::next(const Worker& to) {
  const std::lock_guard lock(mutex_);
  return ++sent_[to];
}

ControlNumbers::Heard ControlNumbers::hear(const Worker& from, uint64_t number, uint64_t request) {
  const std::lock_guard lock(mutex_);
  Numbers& numbers = heard_[from];
  if (number <= numbers.up_to || numbers.beyond.contains(number)) return Heard::kDone;
  const auto [busy, is_first] = numbers.busy.try_emplace(number);
  if (is_first) return Heard::kFirst;
  busy->second.push_back(request);
  return Heard::kBusy;
}

std::vector<uint64_t> ControlNumbers::done(const Worker& from, uint64_t number) {
  const std::lock_guard lock(mutex_);
  const auto found = heard_.find(from);
  if (found == heard_.end()) return {};  // the worker was forgotten meanwhile
  Numbers& numbers = found->second;
  auto busy = numbers.busy.extract(number);
  numbers.beyond.insert(number);
  while (!numbers.beyond.empty() && *numbers.beyond.begin() == numbers.up_to + 1) {
    numbers.beyond.erase(numbers.beyond.begin());
    ++numbers.up_to;
  }
  return busy ? std::move(busy.mapped()) : std::vector<uint64_t>();
}

void ControlNumbers::forget(const Worker& worker) {
  const std::lock_guard lock(mutex_);
  sent_.erase(worker);
  heard_.erase(worker);
}

}  // namespace chorale::rpc

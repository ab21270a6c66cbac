#include "chorale/comm/message_queue.h"

#include "chorale/base/error.h"

namespace chorale::comm {

Chunk room_for_parcel(const Membership& membership, Operation& receive, int from, uint64_t bytes, const Tensor& there) {
  const auto refuse = [&](const std::string& why) {
    throw CallFailed{concat("rank ", membership.global(from), " sent a parcel of ", bytes, " bytes (tag ", receive.tag,
                            "), ", why, "; it is dropped"),
                     membership.global(from)};
  };
  if (bytes > receive.most_bytes) refuse(concat("but at most ", receive.most_bytes, " are taken"));
  try {
    receive.results.clear();
    receive.results.push_back(there.defined() ? there : Tensor::empty({static_cast<int64_t>(bytes)}, DType::kU8));
  } catch (const StateError& error) {
    refuse(error.what());
  }
  receive.take.clear();
  receive.take.push_back({static_cast<std::byte*>(receive.results[0].raw()), static_cast<size_t>(bytes)});
  return receive.take[0];
}

}  // namespace chorale::comm

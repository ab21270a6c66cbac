// Groups of parameters: gathering them and letting them go.
#include <algorithm>
#include <tuple>
#include <utility>

#include "chorale/api/api.h"
#include "chorale/base/error.h"
#include "chorale/comm/coalescing.h"
#include "chorale/fsdp/unit.h"

namespace chorale::fsdp {
namespace {

// The whole parameter in memory of its own, of its payload.
Tensor whole_of(const ShardedParameter& p, const std::vector<Tensor>& payload) {
  const NoGrad quiet;
  const Tensor whole = p.payload->to_whole(payload);
  CHORALE_CHECK(whole.sizes() == p.local_sizes(), "[fully_shard] the payload of ", p.name, " makes a tensor of shape ",
                whole.sizes(), ", but the parameter has ", p.local_sizes());
  const bool is_own =
      std::none_of(payload.begin(), payload.end(), [&](const Tensor& x) { return x.storage() == whole.storage(); });
  return is_own && whole.is_contiguous() && whole.offset() == 0 ? whole : clone(whole);
}

}  // namespace

bool Unit::is_stale() const {
  return state_ == State::kWhole && std::any_of(parameters_.begin(), parameters_.end(), [](const ShardedParameter& p) {
           return p.sharded().storage()->version() != p.version;
         });
}

void Unit::set_payload(const std::function<std::optional<Payload>(const Tensor&)>& choose) {
  reshard();  // whole parameters that are there were sent otherwise
  for (ShardedParameter& p : parameters_) p.payload = choose ? choose(p.sharded()) : std::nullopt;
}

// What this rank sends of a parameter.
std::vector<Tensor> Unit::sent_parts(const ShardedParameter& p) const {
  if (state_ == State::kPiece) return {p.piece()};
  if (!p.payload) return {p.part(parameter_dtype(p))};
  const NoGrad quiet;
  const Tensor part = p.part(p.sharded().dtype());
  std::vector<Tensor> sent = p.payload->of_part(part);
  CHORALE_CHECK(!sent.empty(), "[fully_shard] the payload of ", p.name, " has no tensors");
  for (const Tensor& x : sent) {
    CHORALE_CHECK(x.dims() > p.dim() && x.size(p.dim()) == part.size(p.dim()) && x.is_contiguous(),
                  "[fully_shard] a payload of ", p.name, " must be contiguous and have size ", part.size(p.dim()),
                  " in dimension ", p.dim(), ", as the part has; it is ", x.sizes());
  }
  return sent;
}

void Unit::unshard() {
  if (state_ == State::kWhole || gather_ || parameters_.empty()) return;
  note(Event::Kind::kUnshard);
  Gather gather;
  if (trace::enabled()) gather.launched = trace::Clock::now();
  const comm::Group& group = state_ == State::kPiece ? fewer_->group(size_t{0}) : shards();
  std::optional<comm::Coalescing> together;
  if (group.size() > 1) together.emplace(group);
  for (ShardedParameter& p : parameters_) {
    p.version = p.sharded().storage()->version();
    std::vector<Tensor>& rooms = gather.rooms.emplace_back();
    for (const Tensor& part : sent_parts(p)) {
      const Tensor& room = rooms.emplace_back(p.room_like(part));
      std::vector<Tensor> chunks;
      chunks.reserve(static_cast<size_t>(group.size()));
      for (int r = 0; r < group.size(); ++r) chunks.push_back(p.chunk(room, group.size(), r));
      if (together) {
        std::ignore = group.all_gather(chunks, part, {.tag = number_, .timeout = {}});
      } else {
        const NoGrad quiet;
        copy_(chunks[0], part);
      }
    }
  }
  if (together) {
    gather.work = together->end();
    wake_helper(group);
  }
  gather_ = std::move(gather);
}

void Unit::wait_for_unshard() {
  if (!gather_) return;
  Gather gather = std::move(*gather_);
  gather_.reset();
  if (context_) {
    context_->wait_for(gather.work);
  } else {
    gather.work.wait();  // by hand, before the first forward
  }
  note_span("gather", gather.launched, &gather.work);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    ShardedParameter& p = parameters_[i];
    const NoGrad quiet;
    if (p.payload && state_ == State::kSharded) {
      p.give_bytes(where_it_computes(whole_of(p, gather.rooms[i])));
    } else {
      p.give_bytes(where_it_computes(gather.rooms[i][0]));
    }
    gather.rooms[i].clear();  // before the next one is copied
    p.drop_piece();
  }
  state_ = State::kWhole;
  put_into_module();
}

void Unit::drop_gather() {
  if (!gather_) return;
  wait_for_unshard();
  reshard();
}

void Unit::reshard() {
  if (gather_) wait_for_unshard();
  if (state_ == State::kSharded) return;
  for (ShardedParameter& p : parameters_) {
    if (state_ == State::kWhole) p.take_bytes();
    p.drop_piece();
  }
  state_ = State::kSharded;
  note(Event::Kind::kReshard);
  put_into_module();
}

}  // namespace chorale::fsdp

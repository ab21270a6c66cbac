// How a newcomer gets the state of the job.
#include <algorithm>
#include <tuple>
#include <utility>

#include "chorale/base/error.h"
#include "chorale/comm/coalescing.h"
#include "chorale/comm/objects.h"
#include "chorale/elastic/elastic.h"
#include "chorale/op/copy.h"

namespace chorale::elastic {
namespace {

// What tensors of these names are like, for a rank that does not have them.
comm::Value outline(const NamedTensors& tensors) {
  comm::List list;
  for (const auto& [name, tensor] : tensors) {
    comm::List sizes;
    for (const int64_t size : tensor.sizes()) sizes.emplace_back(size);
    list.emplace_back(comm::List{name, static_cast<int64_t>(tensor.dtype()), std::move(sizes)});
  }
  return {std::move(list)};
}

NamedTensors empty_like(const comm::Value& outline) {
  NamedTensors tensors;
  for (const comm::Value& row : outline.as<comm::List>()) {
    const auto& fields = row.as<comm::List>();
    Shape sizes;
    for (const comm::Value& size : fields[2].as<comm::List>()) sizes.push_back(size.as<int64_t>());
    tensors.emplace_back(fields[0].as<std::string>(),
                         Tensor::empty(sizes, static_cast<DType>(fields[1].as<int64_t>())));
  }
  return tensors;
}

}  // namespace

// Ranks that hold the state have the same parameters and optimizer states, bit for bit: each sends a part, but where
// gradients are not averaged over all of them in every step. What may differ from rank to rank (then these, and always
// buffers, random numbers, what users keep) is the first one's. Ranks that hold the state keep their own: when this
// fails halfway, nothing is lost.
void Elastic::transfer(const std::vector<int>& sources) {
  const int first = sources.front();
  const bool receives = std::find(sources.begin(), sources.end(), group_.rank()) == sources.end();
  NamedTensors states = receives ? NamedTensors() : optimizer_->state_dict();
  std::vector<comm::Value> head(1);
  if (group_.rank() == first) {
    const RandomStream random = default_generator().state();
    comm::List kept;
    for (const Kept& row : kept_) kept.emplace_back(comm::List{row.name, row.save()});
    head[0] = comm::List{done_,
                         steps_,
                         static_cast<int64_t>(random.seed),
                         static_cast<int64_t>(random.offset),
                         std::move(kept),
                         outline(states),
                         committed_epoch_,
                         hook_state() ? comm::Value(hook_state()->save()) : comm::Value(),
                         averaged_,
                         commits_};
  }
  comm::broadcast_object_list(group_, head, first);
  const auto& fields = head[0].as<comm::List>();
  if (receives) states = empty_like(fields[5]);

  const NoGrad scope;
  NamedTensors shared = model_->named_parameters();
  shared.insert(shared.end(), states.begin(), states.end());
  // One call for all that a rank sends: waiting for each other costs more than small tensors.
  std::vector<comm::Work> works;
  const bool ranks_differ = make_averager_ || (hook_state() && !hook_state()->keeps_ranks_equal());
  const size_t parts = ranks_differ ? 1 : sources.size();
  // Those who hold the state get the same bits again, or throw away what is another rank's.
  const auto room = [&](const Tensor& x, int source, bool is_alike) {
    return is_alike || receives || group_.rank() == source ? x : Tensor::empty(x.sizes(), x.dtype());
  };
  for (size_t part = 0; part < parts; ++part) {
    const int source = sources[part];
    comm::Coalescing together(group_);
    for (size_t i = part; i < shared.size(); i += parts)
      std::ignore = group_.broadcast(room(shared[i].second, source, !ranks_differ), source);
    if (source == first) {
      for (const auto& [name, buffer] : model_->named_buffers())
        std::ignore = group_.broadcast(room(buffer, first, false), first);
    }
    works.push_back(together.end());
  }
  for (const comm::Work& work : works) work.wait();
  if (!receives) return;

  optimizer_->load_state_dict(states);
  default_generator().restore(
      {static_cast<uint64_t>(fields[2].as<int64_t>()), static_cast<uint64_t>(fields[3].as<int64_t>())});
  load_kept(fields[4]);
  CHORALE_CHECK_STATE(fields[7].is_nothing() == !hook_state(), "[elastic] the others train ",
                      fields[7].is_nothing() ? "without" : "with", " a hook of communication, and this rank does not");
  if (hook_state()) hook_state()->load(fields[7].as<std::string>());
  done_ = fields[0].as<int64_t>();
  steps_ = fields[1].as<int64_t>();
  committed_epoch_ = fields[6].as<int64_t>();
  averaged_ = fields[8].as<int64_t>();
  commits_ = fields[9].as<int64_t>();
}

// What another rank, or this one before, has saved of what is kept: names and texts.
void Elastic::load_kept(const comm::Value& saved) {
  const auto& kept = saved.as<comm::List>();
  CHORALE_CHECK_STATE(kept.size() == kept_.size(), "[elastic] there are ", kept.size(),
                      " saved things besides model and optimizer, but this rank keeps ", kept_.size());
  for (size_t i = 0; i < kept_.size(); ++i) {
    const auto& row = kept[i].as<comm::List>();
    CHORALE_CHECK_STATE(row[0].as<std::string>() == kept_[i].name, "[elastic] ", row[0].as<std::string>(),
                        " was saved where this rank keeps ", kept_[i].name);
    kept_[i].load(row[1].as<std::string>());
  }
}

}  // namespace chorale::elastic

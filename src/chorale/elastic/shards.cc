#include "chorale/elastic/shards.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "chorale/api/api.h"
#include "chorale/base/error.h"
#include "chorale/comm/objects.h"
#include "chorale/sharding/builder.h"
#include "chorale/sharding/sharded.h"

namespace chorale::elastic {
namespace {

// Keys of a state, in memory and on disk.
constexpr const char *kModel = "model/", *kOptimizer = "optimizer/", *kPersonal = "rank", *kStep = "step";

snapshot::State state_of(const Sharded& trained) {
  snapshot::State state = snapshot::state_of(trained.parameters, kModel);
  for (const auto& [name, x] : trained.optimizer->state_dict()) snapshot::add_chunks(state, kOptimizer + name, x);
  return state;
}

// Memory for the states of an optimizer that has made none yet: "state/PARAMETER/NAME" is spread as the parameter is.
NamedTensors rooms_of(const Sharded& fresh, const Outlines& found) {
  constexpr std::string_view kState = "state/";
  const NoGrad quiet;
  NamedTensors rooms;
  const std::string prefix = kOptimizer;
  for (auto at = found.lower_bound(prefix); at != found.end() && at->first.starts_with(prefix); ++at) {
    const std::string name = at->first.substr(prefix.size());
    const Outline& like = at->second;
    const size_t end = name.rfind('/');
    const auto parameter = std::find_if(fresh.parameters.begin(), fresh.parameters.end(), [&](const auto& entry) {
      return name.starts_with(kState) && name.substr(kState.size(), end - kState.size()) == entry.first;
    });
    const bool is_spread = parameter != fresh.parameters.end() && parameter->second.is_sharded() &&
                           parameter->second.sizes() == like.sizes;
    rooms.emplace_back(name, is_spread ? to(zeros_like(detach(parameter->second)), like.dtype)
                                       : Tensor::empty(like.sizes, like.dtype));
  }
  return rooms;
}

snapshot::State with_rooms(const Sharded& fresh, const NamedTensors& rooms) {
  snapshot::State wanted = snapshot::state_of(fresh.parameters, kModel);
  for (const auto& [name, room] : rooms) snapshot::add_chunks(wanted, kOptimizer + name, room);
  return wanted;
}

bool has_checkpoint(const comm::Group& group, const std::filesystem::path& folder) {
  if (folder.empty()) return false;
  int64_t there = group.rank() == 0 && snapshot::has_checkpoint(folder) ? 1 : 0;
  group.broadcast(std::span(&there, 1), 0).wait();
  return there != 0;
}

}  // namespace

std::string CopyCosts::text() const {
  return concat("copies of parts: ", count, " of ", static_cast<double>(bytes) / (1 << 20), " MiB for each rank, ",
                count > 0 ? ms / static_cast<double>(count) : 0, " ms each, longest ", longest_ms, " ms");
}

Shards::Shards(Make make, ShardedOptions options) : make_(std::move(make)), options_(std::move(options)) {
  CHORALE_CHECK(make_, "[elastic] a function is needed that makes what is trained for a group of ranks");
  CHORALE_CHECK(options_.copy_every >= 0 && options_.save_every >= 0,
                "[elastic] copies and checkpoints are made every so many steps, or never (0), not ",
                std::min(options_.copy_every, options_.save_every));
}

std::vector<Source> Shards::sources(const std::optional<Moment>& live, const Personal& personal) const {
  std::vector<Source> all;
  if (live) {
    all.push_back({{*live, split_}, true, state_of(now_)});
    all.back().state.bytes[kPersonal] = personal();
  }
  for (const Copy& copy : copies_) {
    if (!copy.cut) continue;
    all.push_back({*copy.cut, true, unpacked(copy.own)});
    for (const Tensor& other : copy.others) all.push_back({*copy.cut, false, unpacked(other)});
  }
  return all;
}

Shards::Start Shards::enter(const comm::Group& group, int64_t epoch, std::optional<Moment> live,
                            const Personal& personal, bool begins) {
  const Holdings all(group, sources(live, personal));
  Sharded fresh = make_(group);
  CHORALE_CHECK_STATE(fresh.optimizer, "[elastic] what was made for the ranks has no optimizer");
  std::vector<std::string> keys;
  keys.reserve(fresh.parameters.size());
  for (const auto& [name, x] : fresh.parameters) keys.push_back(kModel + name);
  const bool is_saved = has_checkpoint(group, options_.folder);
  Start start;
  if (const std::optional<Cut> cut = all.newest_whole(keys)) {
    const NamedTensors rooms = rooms_of(fresh, all.outlines(*cut));
    all.fill(*cut, with_rooms(fresh, rooms));
    fresh.optimizer->load_state_dict(rooms);
    start.moment = cut->moment;
    const snapshot::State* own = all.own(cut->moment);
    if (own) start.personal = own->bytes.at(kPersonal);
    if (const std::vector<int> owners = all.owners(cut->moment); std::ssize(owners) < group.size()) {
      std::vector<comm::Value> first(1, comm::Value(start.personal));
      comm::broadcast_object_list(group, first, group.global_rank(owners.front()));
      if (!own) start.personal = first[0].as<std::string>();
    }
    // What is whole because ranks have it anyway says nothing of the copies.
    const bool is_live = live && *cut == Cut{*live, split_};
    for (size_t i = 0; i < copies_.size(); ++i) {
      if (!is_live && copies_[i].cut && *copies_[i].cut == *cut) whole_ = i;
    }
  } else if (is_saved) {
    start = load(group, fresh, epoch);
  } else if (!begins && options_.lost) {
    copies_ = {};
    start.is_lost = true;
  } else {
    CHORALE_CHECK_STATE(begins, "[elastic] ranks are gone and so are the copies that others had of their parts, and ",
                        options_.folder.empty() ? "no folder for checkpoints was given"
                                                : concat("there is no checkpoint in ", options_.folder.string()),
                        ": the state of the job is lost");
  }
  now_ = std::move(fresh);
  sharding::forget_decisions();  // those of before keep the groups of before
  split_ = epoch;
  has_copied_ = false;
  last_copied_.reset();
  last_saved_ = is_saved ? start.moment.step : -1;
  // A job that begins: what differs from rank to rank is the first one's.
  if (start.personal.empty()) {
    start.personal = live ? all.own(*live)->bytes.at(kPersonal) : personal();
    std::vector<comm::Value> first(1, comm::Value(start.personal));
    comm::broadcast_object_list(group, first, group.global_rank(0));
    if (!live) start.personal = first[0].as<std::string>();
  }
  return start;
}

Shards::Start Shards::load(const comm::Group& group, const Sharded& fresh, int64_t epoch) const {
  Outlines found;
  for (const auto& [key, saved] : snapshot::index_of(group, options_.folder).tensors)
    found.emplace(key, Outline{saved.dtype, saved.sizes});
  const NamedTensors rooms = rooms_of(fresh, found);
  snapshot::State wanted = with_rooms(fresh, rooms);
  wanted.bytes = {{kPersonal, ""}, {kStep, ""}};
  snapshot::load(group, options_.folder, wanted);
  fresh.optimizer->load_state_dict(rooms);
  return {.moment = {std::stoll(wanted.bytes.at(kStep)), epoch},
          .personal = wanted.bytes.at(kPersonal),
          .is_from_file = true};
}

bool Shards::copy_is_due(const Moment& moment, int ranks) const {
  if (options_.copy_every == 0 || ranks == 1 || now_.has_replicas || last_copied_ == Cut{moment, split_}) return false;
  return !last_copied_ || moment.step % options_.copy_every == 0;
}

void Shards::copy(const comm::Group& group, const Moment& moment, const Personal& personal,
                  const std::vector<int>& keepers, const std::function<void()>& midway) {
  const auto start = std::chrono::steady_clock::now();
  Copy& copy = copies_[1 - whole_];
  copy.cut.reset();
  snapshot::State state = state_of(now_);
  state.bytes[kPersonal] = personal();
  copy.own = packed(state, copy.own);
  std::vector<int64_t> sizes(keepers.size());
  const int64_t own_size = copy.own.elems();
  group.all_gather_into(std::span(sizes), std::span(&own_size, 1)).wait();
  midway();
  std::vector<comm::Work> works;
  const int self = group.rank();
  if (const int keeper = keepers[static_cast<size_t>(self)]; keeper >= 0)
    works.push_back(group.isend(copy.own, group.global_rank(keeper)));
  std::vector<Tensor> rooms = std::exchange(copy.others, {});
  for (size_t rank = 0; rank < keepers.size(); ++rank) {
    if (keepers[rank] != self) continue;
    const auto fits = std::find_if(rooms.begin(), rooms.end(),
                                   [&](const Tensor& room) { return room.defined() && room.elems() == sizes[rank]; });
    copy.others.push_back(fits != rooms.end() ? std::exchange(*fits, {}) : Tensor::empty({sizes[rank]}, DType::kU8));
    works.push_back(group.irecv(copy.others.back(), group.global_rank(static_cast<int>(rank))));
  }
  for (const comm::Work& work : works) work.wait();
  copy.cut = last_copied_ = Cut{moment, split_};
  has_copied_ = true;
  ++costs_.count;
  costs_.bytes = own_size;
  const double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  costs_.ms += ms;
  costs_.longest_ms = std::max(costs_.longest_ms, ms);
}

void Shards::note_commit() {
  if (std::exchange(has_copied_, false)) whole_ = 1 - whole_;
}

bool Shards::save_is_due(const Moment& moment) const {
  if (options_.folder.empty() || options_.save_every == 0) return false;
  return last_saved_ < 0 || (moment.step % options_.save_every == 0 && moment.step != last_saved_);
}

void Shards::save(const comm::Group& group, const Moment& moment, const Personal& personal) {
  snapshot::State state = state_of(now_);
  if (group.rank() == 0) state.bytes = {{kPersonal, personal()}, {kStep, std::to_string(moment.step)}};
  snapshot::save(group, options_.folder, state);
  last_saved_ = moment.step;
}

}  // namespace chorale::elastic

// Jobs whose ranks each have a part of the model: what they keep safe, and how they go on with it.
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "chorale/base/error.h"
#include "chorale/base/log.h"
#include "chorale/comm/value.h"
#include "chorale/elastic/elastic.h"
#include "chorale/reducer/copy_values.h"

namespace chorale::elastic {

// What this rank knows by itself.
std::string Elastic::personal() const {
  const RandomStream random = default_generator().state();
  comm::List kept, own;
  for (const Kept& row : kept_) kept.emplace_back(comm::List{row.name, row.save()});
  for (const auto& [name, buffer] : buffers()) own.emplace_back(buffer);
  return comm::encode(comm::List{static_cast<int64_t>(random.seed), static_cast<int64_t>(random.offset), steps_,
                                 std::move(own), std::move(kept)});
}

void Elastic::load_personal(const std::string& text, bool with_kept) {
  const comm::Value value = comm::decode(text);
  const auto& fields = value.as<comm::List>();
  default_generator().restore(
      {static_cast<uint64_t>(fields[0].as<int64_t>()), static_cast<uint64_t>(fields[1].as<int64_t>())});
  const NamedTensors own = buffers();
  const auto& saved = fields[3].as<comm::List>();
  CHORALE_CHECK_STATE(saved.size() == own.size(), "[elastic] the model had ", saved.size(), " buffers and has ",
                      own.size(), " for the ranks that there are now");
  for (size_t i = 0; i < own.size(); ++i) reducer::copy_values(saved[i].as<Tensor>(), own[i].second);
  if (!with_kept) return;
  if (!holds_) steps_ = fields[2].as<int64_t>();
  load_kept(fields[4]);
}

// What the ranks of an epoch go on with.
void Elastic::enter(const comm::Group& group, bool begins) {
  const bool is_live_here = holds_ && !is_lost_;
  const std::optional<Moment> live = is_live_here ? std::optional(Moment{done_, committed_epoch_}) : std::nullopt;
  const Shards::Start start = shards_->enter(
      group, epoch_, live, [this] { return personal(); }, begins);
  optimizer_ = shards_->now().optimizer;
  buffers_.clear();
  const bool is_live = live && *live == start.moment;
  if (holds_ && !is_live) {
    went_back_ = true;
    pending_ = nullptr;
    last_ = false;
  }
  done_ = commits_ = start.moment.step;
  committed_epoch_ = start.moment.epoch;
  load_personal(start.personal, !is_live);
  // A newcomer is told whether somebody has stopped the job; those that go back, or on from a file, see again.
  if (went_back_ || start.is_from_file || start.is_lost) steps_ = asked_steps_;
  check_kept();
  is_lost_ = start.is_lost;
  if (is_lost_) shards_->options().lost();
  is_lost_ = false;
}

// Called before a step: makes the copies and checkpoints that are due.
void Elastic::keep_safe() {
  const Moment moment{done_, committed_epoch_};
  const auto own = [this] { return personal(); };
  if (seat_ && done_ < steps_ && shards_->copy_is_due(moment, group_.size())) {
    std::vector<int> right(static_cast<size_t>(group_.size()));
    for (int rank = 0; rank < group_.size(); ++rank) right[static_cast<size_t>(rank)] = (rank + 1) % group_.size();
    shards_->copy(group_, moment, own, right, [this] { watch(Phase::kCopy); });
    if (shards_->costs().count == 1 && group_.rank() == 0) log_info(concat("[elastic] ", shards_->costs().text()));
  }
  if (shards_->save_is_due(moment)) shards_->save(group(), moment, own);
}

// Ranks that leave on demand take no part with them: each gives its own to one that stays.
void Elastic::hand_over() {
  // On several nodes another launcher may have been the first to tell its ranks.
  const Deadline patience = within(options_.patience);
  while (seat_->board->latest() <= epoch_ && !seat_->board->is_stopping() && !patience.passed())
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  const auto next = transport::Epoch::parse(
      seat_->store->get(transport::epoch_key(seat_->board->latest()), within(std::chrono::seconds(30))));
  const int64_t stays = next.rank_of(seat_->member) >= 0 ? 1 : 0;
  std::vector<int64_t> all(static_cast<size_t>(group_.size()));
  group_.all_gather_into(std::span(all), std::span(&stays, 1)).wait();
  std::vector<int> keepers, staying;
  for (int rank = 0; rank < group_.size(); ++rank) {
    if (all[static_cast<size_t>(rank)] != 0) staying.push_back(rank);
  }
  if (staying.empty() || std::ssize(staying) == group_.size()) return;
  for (int rank = 0, turn = 0; rank < group_.size(); ++rank) {
    const bool leaves = all[static_cast<size_t>(rank)] == 0;
    keepers.push_back(leaves ? staying[static_cast<size_t>(turn++) % staying.size()] : -1);
  }
  shards_->copy(
      group_, {done_, committed_epoch_}, [this] { return personal(); }, keepers, [] {});
  group_.barrier().wait();
  shards_->note_commit();
}

}  // namespace chorale::elastic

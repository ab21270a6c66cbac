#include "chorale/elastic/batches.h"

#include "chorale/base/error.h"

namespace chorale::elastic {

Batches::Batches(std::shared_ptr<const data::Sampler> order, int64_t batch) : order_(std::move(order)), batch_(batch) {
  CHORALE_CHECK(order_, "[elastic] batches need an order of samples");
  CHORALE_CHECK(batch_ >= 1 && batch_ <= order_->size(), "[elastic] a batch of ", batch_, " cannot be had from ",
                order_->size(), " samples");
}

int64_t Batches::steps_per_epoch() const { return order_->size() / batch_; }

std::pair<int64_t, int64_t> Batches::part(int rank, int ranks) const {
  CHORALE_CHECK(ranks >= 1 && rank >= 0 && rank < ranks, "[elastic] rank ", rank, " of ", ranks, " cannot be");
  CHORALE_CHECK(ranks <= batch_, "[elastic] a batch of ", batch_, " samples is too small for ", ranks,
                " ranks; take a larger batch, or fewer ranks (--elastic MIN:MAX)");
  return {rank * batch_ / ranks, (rank + 1) * batch_ / ranks};
}

std::vector<int64_t> Batches::of(int64_t step, int rank, int ranks) const {
  const auto [begin, end] = part(rank, ranks);
  const int64_t epoch = step / steps_per_epoch(), first = step % steps_per_epoch() * batch_;
  if (epoch != epoch_) {
    indices_ = order_->indices(epoch);
    epoch_ = epoch;
  }
  return {indices_.begin() + first + begin, indices_.begin() + first + end};
}

double Batches::weight(int rank, int ranks) const {
  const auto [begin, end] = part(rank, ranks);
  return static_cast<double>(ranks * (end - begin)) / static_cast<double>(batch_);
}

}  // namespace chorale::elastic

#include "chorale/elastic/batches.h"

#include <tuple>
#include <utility>

#include "chorale/base/error.h"

namespace chorale::elastic {
namespace {

std::pair<int64_t, int64_t> part_of(int64_t batch, int rank, int ranks) {
  CHORALE_CHECK(ranks >= 1 && rank >= 0 && rank < ranks, "[elastic] rank ", rank, " of ", ranks, " cannot be");
  CHORALE_CHECK(ranks <= batch, "[elastic] a batch of ", batch, " samples is too small for ", ranks,
                " ranks; take a larger batch, or fewer ranks (--elastic MIN:MAX)");
  return {rank * batch / ranks, (rank + 1) * batch / ranks};
}

}  // namespace

Batches::Batches(std::shared_ptr<const data::Sampler> order, int64_t batch) : order_(std::move(order)), batch_(batch) {
  CHORALE_CHECK(order_, "[elastic] batches need an order of samples");
  CHORALE_CHECK(batch_ >= 1 && batch_ <= order_->size(), "[elastic] a batch of ", batch_, " cannot be had from ",
                order_->size(), " samples");
}

int64_t Batches::steps_per_epoch() const { return order_->size() / batch_; }

std::pair<int64_t, int64_t> Batches::part(int rank, int ranks) const { return part_of(batch_, rank, ranks); }

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

Pieces::Pieces(std::shared_ptr<const data::Sampler> order, const Options& options)
    : order_(std::move(order)), batch_(options.batch), steps_(order_->size() / batch_) {
  CHORALE_CHECK(options.largest >= 1 && options.first_ranks >= 1, "[elastic] a piece has at least one sample");
  if (options.local) {
    const int64_t own = batch_ / options.first_ranks;
    std::tie(begin_, end_) = std::pair(options.rank * own, (options.rank + 1) * own);
  } else {
    std::tie(begin_, end_) = part_of(batch_, options.rank, options.ranks);
  }
  pieces_ = (samples_of_step() + options.largest - 1) / options.largest;
}

data::Batches Pieces::batches(int64_t epoch) const {
  const std::vector<int64_t> indices = order_->indices(epoch);
  data::Batches result;
  result.reserve(static_cast<size_t>(size()));
  for (int64_t step = 0; step < steps_; ++step) {
    for (int64_t piece = 0; piece < pieces_; ++piece) {
      std::vector<int64_t>& samples = result.emplace_back();
      const int64_t last = begin_ + (piece + 1) * samples_of_step() / pieces_;
      for (int64_t i = begin_ + piece * samples_of_step() / pieces_; i < last; ++i)
        samples.push_back(indices[static_cast<size_t>((step * batch_ + i) % std::ssize(indices))]);
    }
  }
  return result;
}

}  // namespace chorale::elastic

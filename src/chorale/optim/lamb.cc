#include "chorale/optim/lamb.h"

#include <cmath>

#include "chorale/base/parallel_for.h"
#include "chorale/optim/check.h"

namespace chorale::optim {

void Lamb::check(const Attrs& attrs) const {
  const auto& o = attrs.get<LambOptions>();
  check_not_negative(name(), "lr", o.lr);
  check_decay(name(), "beta1", o.beta1);
  check_decay(name(), "beta2", o.beta2);
  check_not_negative(name(), "eps", o.eps);
  check_not_negative(name(), "weight_decay", o.weight_decay);
}

Optimizer::Recipe Lamb::recipe(const Attrs& attrs, int64_t step) const {
  const auto& o = attrs.get<LambOptions>();
  const auto t = static_cast<double>(step);
  Recipe recipe;
  recipe.rule = vec::UpdateRule::kLambMoments;
  recipe.params.sign = o.maximize ? -1 : 1;
  recipe.params.weight_decay = o.weight_decay;
  recipe.params.rate = o.lr;
  recipe.params.gain1 = 1 - o.beta1;
  recipe.params.decay2 = o.beta2;
  recipe.params.gain2 = 1 - o.beta2;
  recipe.params.scale1 = 1 / (1 - std::pow(o.beta1, t));
  recipe.params.root_scale = 1 / std::sqrt(1 - std::pow(o.beta2, t));
  recipe.params.eps = o.eps;
  return recipe;
}

void Lamb::run(Batch& batch) const {
  // Chunks of one size whatever the threads, so that sums always add up in the same order.
  constexpr int64_t kChunkElems = 16384;
  struct Chunk {
    const Job* job;
    int64_t begin, n;
    double sums[2] = {0, 0};
  };
  std::vector<Chunk> chunks;
  for (const Job& job : batch.jobs) {
    for (int64_t at = 0; at < job.span.n; at += kChunkElems)
      chunks.push_back({&job, at, std::min(kChunkElems, job.span.n - at)});
  }
  const auto for_each_chunk = [&](auto body) {
    parallel_for(static_cast<int64_t>(chunks.size()), 2, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) body(chunks[static_cast<size_t>(i)]);
    });
  };
  for_each_chunk([&](Chunk& chunk) {
    vec::UpdateSpan span = piece_of(*chunk.job, chunk.begin, chunk.n);
    span.sums = chunk.sums;
    vec::update_loop(vec::UpdateRule::kLambMoments, chunk.job->dtype)(span, batch.recipes[chunk.job->recipe].params);
  });
  std::vector<double> ratios(batch.jobs.size());
  for (size_t i = 0, c = 0; i < batch.jobs.size(); ++i) {
    double weight = 0, step = 0;
    for (; c < chunks.size() && chunks[c].job == &batch.jobs[i]; ++c) {
      weight += chunks[c].sums[0];
      step += chunks[c].sums[1];
    }
    ratios[i] = weight > 0 && step > 0 ? std::sqrt(weight / step) : 1;
  }
  for_each_chunk([&](const Chunk& chunk) {
    vec::UpdateParams params = batch.recipes[chunk.job->recipe].params;
    params.rate *= ratios[static_cast<size_t>(chunk.job - batch.jobs.data())];
    vec::update_loop(vec::UpdateRule::kLambApply, chunk.job->dtype)(piece_of(*chunk.job, chunk.begin, chunk.n), params);
  });
}

}  // namespace chorale::optim

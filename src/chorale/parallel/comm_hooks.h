// Other ways to average gradients than sending them as they are:
//
//   ddp.register_comm_hook(parallel::bf16_compress_hook());
//
// All of them give every rank the same bits. Those that take a group use it instead of the wrapper's own; it must
// outlive the hook. PowerSGD is in power_sgd.h. Where ranks may die (elastic/elastic.h), all can be used that are given
// no group.
#pragma once

#include <memory>

#include "chorale/reducer/grad_bucket.h"

namespace chorale::parallel {

using reducer::CommHook;
using reducer::GradBucket;
using reducer::HookState;

// The average of a tensor over the group, in place: what a hook of one's own may end with. Values are divided before
// they are added, which matters to f16.
comm::Future average(const comm::Group& group, const Tensor& values);

// What happens without a hook.
CommHook allreduce_hook(const comm::Group* group = nullptr);
// Does nothing: gradients stay this rank's own. It shows what communication costs.
CommHook noop_hook();

// Half the bytes of f32. f16 has more digits, bf16 no overflow. Complex gradients travel as they are.
CommHook fp16_compress_hook(const comm::Group* group = nullptr);
CommHook bf16_compress_hook(const comm::Group* group = nullptr);
// Another hook gets the bucket in the 16-bit dtype.
CommHook fp16_compress_wrapper(CommHook inner);
CommHook bf16_compress_wrapper(CommHook inner);

// A quarter of the bytes of f32: integers of 8 bits between the smallest and the largest value of a bucket, or of each
// chunk of it.
CommHook quantize_per_tensor_hook(const comm::Group* group = nullptr);
CommHook quantize_per_channel_hook(const comm::Group* group = nullptr, int64_t chunk_elems = 512);

struct PostLocalSgdOptions {
  // The first steps average over all ranks,
  int64_t start_iteration = 0;
  // the later ones over this group, which must outlive the hook; null: over the ranks of this host. Parameters are to
  // be averaged over all ranks now and then (averaging.h). Where ranks may die, the program gives the group a new value
  // whenever they change (ElasticOptions::rebuild).
  const comm::Group* subgroup = nullptr;
  // False: the later ones leave gradients this rank's own.
  bool average_in_subgroup = true;
};
CommHook post_local_sgd_hook(const PostLocalSgdOptions& options);

}  // namespace chorale::parallel

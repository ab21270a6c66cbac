#include "chorale/parallel/comm_hooks.h"

#include <functional>
#include <limits>
#include <optional>
#include <tuple>

#include "chorale/api/api.h"
#include "chorale/base/error.h"
#include "chorale/transport/host_identity.h"

namespace chorale::parallel {
namespace {

const comm::Group& group_of(const GradBucket& bucket, const comm::Group* chosen) {
  return chosen ? *chosen : bucket.group();
}

// The state of a hook that knows nothing from step to step. A hook that was given a group does not follow when ranks
// change.
std::shared_ptr<HookState> no_state(const comm::Group* chosen = nullptr) {
  return chosen ? nullptr : std::make_shared<HookState>();
}

CommHook compress_wrapper(const char* name, DType dtype, CommHook inner) {
  CHORALE_CHECK(inner.run, "[comm hook] there is no hook to be wrapped by ", name);
  const auto run = [dtype, run = std::move(inner.run)](GradBucket& bucket) {
    const Tensor original = bucket.buffer();
    if (!is_floating(original.dtype())) return run(bucket);  // complex numbers have no 16-bit form
    bucket.set_buffer(to(original, dtype));
    return run(bucket).then([original](const Tensors& reduced) { return Tensors{copy_(original, reduced[0])}; });
  };
  return {concat(name, "(", inner.name, ")"), run, inner.state};
}
CommHook compress_hook(const char* name, DType dtype, const comm::Group* group) {
  CommHook hook = compress_wrapper(name, dtype, allreduce_hook(group));
  hook.name = name;
  return hook;
}

// Rows of numbers as integers of 8 bits: x = (code - zero) * scale, with a scale and a zero for each row. 0 is always
// among the numbers that can be written, so that what is not there stays nothing.
struct Quantized {
  Tensor codes;       // u8 [rows, columns]
  Tensor scale_zero;  // [rows, 2]

  explicit Quantized(const Tensor& x) {
    const Tensor low = minimum(amin(x, {1}, true), 0), high = maximum(amax(x, {1}, true), 0);
    // The scale is not finite where x is not, and then neither is what comes out.
    const Tensor scale = maximum((high - low) / 255, std::numeric_limits<float>::min());
    const Tensor zero = clamp(round(-low / scale), 0, 255);
    scale_zero = cat({scale, zero}, 1);
    codes = to(clamp(round(x / scale) + zero, 0, 255), DType::kU8);
  }
};

// Every rank sends its codes to all; each adds up the same numbers in the same order.
CommHook quantize_hook(const char* name, const comm::Group* chosen, std::optional<int64_t> chunk_elems) {
  return {name,
          [chosen, chunk_elems](GradBucket& bucket) {
            const comm::Group& group = group_of(bucket, chosen);
            const Tensor& buffer = bucket.buffer();
            if (buffer.elems() == 0) return reducer::ready_future(buffer);
            const int64_t columns = chunk_elems.value_or(buffer.elems());
            const int64_t rows = (buffer.elems() + columns - 1) / columns;
            const Tensor wide = to(buffer, compute_of(buffer.dtype()));
            const Quantized own(view(pad(wide, {0, rows * columns - buffer.elems()}), {rows, columns}));
            const Tensor scales = empty({group.size(), rows, 2}, wide.dtype(), wide.device());
            const Tensor codes = empty({group.size(), rows, columns}, DType::kU8, wide.device());
            std::ignore = group.all_gather_into(scales, own.scale_zero);  // done before the next one is
            return group.all_gather_into(codes, own.codes).future().then([=](const Tensors&) {
              const int64_t ranks = codes.size(0);
              Tensor total = zeros({rows, columns}, wide.dtype(), wide.device());
              for (int64_t r = 0; r < ranks; ++r) {
                const Tensor of_rank = select(scales, 0, r);
                const Tensor scale = narrow(of_rank, 1, 0, 1), zero = narrow(of_rank, 1, 1, 1);
                addcmul_(total, to(select(codes, 0, r), wide.dtype()) - zero, scale / ranks);
              }
              return Tensors{copy_(buffer, narrow(flatten(total), 0, 0, buffer.elems()))};
            });
          },
          no_state(chosen)};
}

// The ranks of the group that share this one's host.
comm::Group host_group(const comm::Group& group) {
  return group.split(static_cast<int64_t>(std::hash<std::string>()(transport::host_identity()) >> 1));
}

}  // namespace

comm::Future average(const comm::Group& group, const Tensor& values) {
  return group.all_reduce(values, comm::premultiplied_sum(1.0 / group.size())).future();
}

CommHook allreduce_hook(const comm::Group* group) {
  return {"allreduce", [group](GradBucket& bucket) { return average(group_of(bucket, group), bucket.buffer()); },
          no_state(group)};
}
CommHook noop_hook() {
  struct State final : HookState {
    bool keeps_ranks_equal() const override { return false; }
  };
  return {"noop", [](GradBucket& bucket) { return reducer::ready_future(bucket.buffer()); }, std::make_shared<State>()};
}

CommHook fp16_compress_hook(const comm::Group* group) { return compress_hook("fp16_compress", DType::kF16, group); }
CommHook bf16_compress_hook(const comm::Group* group) { return compress_hook("bf16_compress", DType::kBF16, group); }
CommHook fp16_compress_wrapper(CommHook inner) {
  return compress_wrapper("fp16_compress", DType::kF16, std::move(inner));
}
CommHook bf16_compress_wrapper(CommHook inner) {
  return compress_wrapper("bf16_compress", DType::kBF16, std::move(inner));
}

CommHook quantize_per_tensor_hook(const comm::Group* group) {
  return quantize_hook("quantize_per_tensor", group, std::nullopt);
}
CommHook quantize_per_channel_hook(const comm::Group* group, int64_t chunk_elems) {
  CHORALE_CHECK(chunk_elems > 0, "[quantize_per_channel] expected chunks of at least one element, found ", chunk_elems);
  return quantize_hook("quantize_per_channel", group, chunk_elems);
}

CommHook post_local_sgd_hook(const PostLocalSgdOptions& options) {
  CHORALE_CHECK(options.start_iteration >= 0, "[post_local_sgd] expected the number of first steps, found ",
                options.start_iteration);
  struct State final : HookState {
    int64_t iteration = 0, before = 0;
    comm::Group host;  // made when it is needed first, by all ranks in the same step

    void begin() override { before = iteration; }
    void abort() override { iteration = before; }
    void leave() override { host = comm::Group(); }
    bool keeps_ranks_equal() const override { return false; }
    std::string save() const override { return std::to_string(iteration); }
    void load(const std::string& saved) override { iteration = std::stoll(saved); }
  };
  const auto state = std::make_shared<State>();
  return {"post_local_sgd",
          [options, state](GradBucket& bucket) {
            const bool first_steps = state->iteration < options.start_iteration;
            if (bucket.is_last()) ++state->iteration;
            if (first_steps) return average(bucket.group(), bucket.buffer());
            if (!options.average_in_subgroup) return reducer::ready_future(bucket.buffer());
            if (options.subgroup) return average(*options.subgroup, bucket.buffer());
            if (!state->host.is_member()) state->host = host_group(bucket.group());
            return average(state->host, bucket.buffer());
          },
          state};
}

}  // namespace chorale::parallel

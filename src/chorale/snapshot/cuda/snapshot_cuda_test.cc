// Checkpoints of tensors on a GPU.
#include "chorale/snapshot/snapshot.h"

#include <gtest/gtest.h>

#include "chorale/api/api.h"
#include "chorale/comm/spec_test_util.h"
#include "chorale/device/cuda/gpu_test_util.h"
#include "chorale/device/stream.h"
#include "chorale/snapshot/async_saver.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::snapshot {
namespace {

using cuda::kGpu;

class CudaSnapshots : public cuda::GpuNumbersTest {};

TEST_F(CudaSnapshots, HoldWhatTheGpuHolds) {
  const TemporaryFolder folder;
  comm::run_ranks(2, [&](comm::Group& group) {
    const StreamScope own(make_stream(kGpu));
    const Tensor host = comm::numbered<float>({5, 3}, [](int64_t i) { return static_cast<float>(i) / 7; });
    const Tensor x = to(host, kGpu), back = zeros({5, 3}, DType::kF32, kGpu);
    AsyncSaver saver(group);
    for (int i = 0; i < 2; ++i) {  // the second time into memory that is there
      saver.start(folder / std::to_string(i), state_of(NamedTensors{{"x", x}}));
      fill_(x, 0);  // what was staged is not what is there later
      saver.wait();
      State state = state_of(NamedTensors{{"x", back}});
      load(group, folder / std::to_string(i), state);
      EXPECT_EQ(back.to_vector<float>(), host.to_vector<float>());
      copy_(x, host);
    }
  });
}

}  // namespace
}  // namespace chorale::snapshot

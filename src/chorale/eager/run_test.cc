#include "chorale/eager/run.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "chorale/base/error.h"
#include "chorale/op/copy.h"

namespace chorale::eager {
namespace {

void copy_into(const Tensor& from, const Tensor& to) {
  Eager eager;
  const op::Stack stack{&eager};
  stack.all().call_into(op::kTo, {&from, 1}, op::CopyAttrs{to.dtype()}, {&to, 1});
}

TEST(EagerCallInto, WritesAndCountsTheWrite) {
  const Tensor target = Tensor::from({1.0f, 2.0f}, {2});
  copy_into(Tensor::from({3.0f, 4.0f}, {2}), target);
  EXPECT_EQ(target.to_vector<float>(), (std::vector<float>{3, 4}));
  EXPECT_EQ(target.storage()->version(), 1u);
  EXPECT_STREQ(target.storage()->last_writer(), "to");
}

TEST(EagerCallInto, RefusesReadOnlyMemoryAndChangesNothing) {
  const std::vector<float> memory{1, 2};
  const Tensor target = Tensor::borrow(std::span(memory), {2});
  try {
    copy_into(Tensor::from({3.0f, 4.0f}, {2}), target);
    FAIL() << "no error";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("[to] cannot write into a tensor on read-only memory"), std::string::npos)
        << error.what();
  }
  EXPECT_EQ(memory, (std::vector<float>{1, 2}));
  EXPECT_EQ(target.storage()->version(), 0u);
}

}  // namespace
}  // namespace chorale::eager

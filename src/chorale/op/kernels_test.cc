#include "chorale/op/kernels.h"

#include <gtest/gtest.h>

#include "chorale/base/error.h"
#include "chorale/op/table.h"

namespace chorale::op {
namespace {

void fake(const kernel::KernelArgs&) {}

TEST(Kernels, TheCpuHasThoseThatRowsName) {
  for (const OpDef* row : all_ops()) {
    if (!row->view) {
      EXPECT_EQ(find_kernel(*row, DeviceType::kCpu), row->cpu) << row->name;
    }
    EXPECT_NE(find_kernel(*row, DeviceType::kNull), nullptr) << row->name;
  }
}

TEST(Kernels, RowsKnowTheirNumbers) {
  const Rows rows = all_ops();
  for (size_t i = 0; i < rows.size(); ++i) EXPECT_EQ(rows[i]->facts.number, i) << rows[i]->name;
}

TEST(Kernels, ADeviceGetsItsKernelsByName) {
  const NamedKernel kernels[] = {{"tanh", fake}};
  add_kernels(DeviceType::kCuda, kernels);
  EXPECT_EQ(find_kernel(*find_op("tanh"), DeviceType::kCuda), fake);
  EXPECT_EQ(find_kernel(*find_op("exp"), DeviceType::kCuda), nullptr);
  EXPECT_NE(find_kernel(*find_op("permute"), DeviceType::kCuda), nullptr) << "a view needs no kernel";
  const NamedKernel unknown[] = {{"tahn", fake}};
  EXPECT_THROW(add_kernels(DeviceType::kCuda, unknown), InvalidArgument);
}

TEST(Kernels, LaunchingOneThatIsNotThereNamesOpAndDevice) {
  add_kernels(DeviceType::kCuda, {});
  try {
    launch(*find_op("exp"), {DeviceType::kCuda, 1}, {}, {}, {});
    FAIL() << "no error";
  } catch (const StateError& error) {
    EXPECT_NE(std::string(error.what()).find("[exp] has no kernel for cuda:1"), std::string::npos) << error.what();
  }
}

TEST(Facts, SayWhichInputsMayBeAbsent) {
  const auto optional = [](const char* name) {
    all_ops();
    return find_op(name)->facts.optional;
  };
  EXPECT_EQ(optional("add"), InputSet{});
  EXPECT_EQ(optional("linear"), InputSet{2});
  EXPECT_EQ(optional("attention"), (InputSet{3, 4}));
}

}  // namespace
}  // namespace chorale::op

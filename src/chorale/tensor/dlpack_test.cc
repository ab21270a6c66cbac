#include "chorale/tensor/dlpack.h"

#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "chorale/base/error.h"

namespace chorale {
namespace {

using dlpack::DLManagedTensorVersioned;

// What another library would hand over, built by hand: six floats as 2 x 3.
struct Foreign {
  alignas(16) std::array<float, 6> values{1, 2, 3, 4, 5, 6};
  std::array<int64_t, 10> shape{2, 3};
  std::array<int64_t, 10> strides{3, 1};
  int deleted = 0;
  DLManagedTensorVersioned managed{};

  Foreign() {
    managed.version = {1, 0};
    managed.manager_ctx = this;
    managed.deleter = [](DLManagedTensorVersioned* self) { ++static_cast<Foreign*>(self->manager_ctx)->deleted; };
    managed.dl_tensor = {values.data(), {dlpack::kDLCPU, 0}, 2, {dlpack::kDLFloat, 32, 1},
                         shape.data(),  strides.data(),      0};
  }
  Foreign(const Foreign&) = delete;
};

TEST(DlpackImport, SharesTheBytesAndDeletesOnceWithTheLastTensor) {
  Foreign foreign;
  {
    Tensor view;
    {
      const Tensor x = from_dlpack(&foreign.managed);
      EXPECT_EQ(x.raw(), foreign.values.data());
      EXPECT_EQ(x.dtype(), DType::kF32);
      EXPECT_EQ(x.sizes(), (Shape{2, 3}));
      EXPECT_TRUE(x.is_contiguous());
      EXPECT_FALSE(x.storage()->read_only());
      x.data<float>()[5] = 60;
      view = x.view_as({3}, {1}, 3);
    }
    EXPECT_EQ(foreign.deleted, 0);
    EXPECT_EQ(view.to_vector<int>(), (std::vector<int>{4, 5, 60}));
  }
  EXPECT_EQ(foreign.deleted, 1);
  EXPECT_EQ(foreign.values[5], 60);
}

TEST(DlpackImport, ReadsEveryStridingAndOffset) {
  Foreign plain;
  plain.managed.dl_tensor.strides = nullptr;
  EXPECT_EQ(from_dlpack(&plain.managed).strides(), (Strides{3, 1}));

  Foreign transposed;
  transposed.shape = {3, 2};
  transposed.strides = {1, 3};
  EXPECT_EQ(from_dlpack(&transposed.managed).to_vector<int>(), (std::vector<int>{1, 4, 2, 5, 3, 6}));

  Foreign offset;
  offset.managed.dl_tensor.byte_offset = 8;
  offset.shape = {2, 2};
  offset.strides = {2, 1};
  EXPECT_EQ(from_dlpack(&offset.managed).to_vector<int>(), (std::vector<int>{3, 4, 5, 6}));

  Foreign reversed;
  reversed.managed.dl_tensor.byte_offset = 20;
  reversed.strides = {-3, -1};
  const Tensor x = from_dlpack(&reversed.managed);
  EXPECT_EQ(x.to_vector<int>(), (std::vector<int>{6, 5, 4, 3, 2, 1}));
  EXPECT_EQ(x.storage()->data(), reinterpret_cast<std::byte*>(reversed.values.data()));
  EXPECT_EQ(x.storage()->bytes(), 24u);

  Foreign expanded;
  expanded.strides = {0, 1};
  EXPECT_EQ(from_dlpack(&expanded.managed).to_vector<int>(), (std::vector<int>{1, 2, 3, 1, 2, 3}));
}

TEST(DlpackImport, TakesScalarsAndEmptyTensors) {
  Foreign scalar;
  scalar.managed.dl_tensor.ndim = 0;
  scalar.managed.dl_tensor.shape = scalar.managed.dl_tensor.strides = nullptr;
  EXPECT_EQ(from_dlpack(&scalar.managed).item<float>(), 1);

  Foreign empty;
  empty.shape = {0, 3};
  empty.managed.dl_tensor.data = nullptr;
  EXPECT_EQ(from_dlpack(&empty.managed).sizes(), (Shape{0, 3}));
  EXPECT_EQ(empty.deleted, 1);
}

TEST(DlpackImport, HonoursTheReadOnlyFlag) {
  Foreign foreign;
  foreign.managed.flags = dlpack::kReadOnly;
  const Tensor x = from_dlpack(&foreign.managed);
  EXPECT_TRUE(x.storage()->read_only());
  EXPECT_THROW(x.storage()->check_writable("add"), InvalidArgument);
  // It stays read-only when it is passed on.
  DLManagedTensorVersioned* again = to_dlpack(x);
  EXPECT_EQ(again->flags & dlpack::kReadOnly, dlpack::kReadOnly);
  again->deleter(again);
}

TEST(DlpackImport, ACopiedTensorAndALaterMinorVersionAreFine) {
  Foreign foreign;
  foreign.managed.version = {1, 9};
  foreign.managed.flags = dlpack::kIsCopied;
  EXPECT_FALSE(from_dlpack(&foreign.managed).storage()->read_only());
}

TEST(DlpackImport, ADeleterMayBeAbsent) {
  Foreign foreign;
  foreign.managed.deleter = nullptr;
  EXPECT_EQ(from_dlpack(&foreign.managed).elems(), 6);
  foreign.managed.dl_tensor.ndim = 9;
  EXPECT_THROW(from_dlpack(&foreign.managed), InvalidArgument);
  EXPECT_EQ(foreign.deleted, 0);
}

TEST(DlpackImport, EveryRefusalNamesTheReasonAndDeletesOnce) {
  constexpr int64_t kHuge = int64_t{1} << 62;
  struct Case {
    std::function<void(Foreign&)> spoil;
    const char* part;
  };
  const Case cases[] = {
      {[](Foreign& f) { f.managed.version.major = 2; }, "2.0"},
      {[](Foreign& f) { f.managed.version.major = 0; }, "0.0"},
      {[](Foreign& f) { f.managed.dl_tensor.device.device_type = dlpack::kDLCUDA; }, "type 2"},
      {[](Foreign& f) { f.managed.dl_tensor.device.device_type = 77; }, "type 77"},
      {[](Foreign& f) { f.managed.dl_tensor.dtype.lanes = 4; }, "4 lanes"},
      {[](Foreign& f) { f.managed.dl_tensor.dtype.lanes = 0; }, "0 lanes"},
      {[](Foreign& f) {
         f.managed.dl_tensor.dtype = {dlpack::kDLUInt, 32, 1};
       },
       "code 1 with 32 bits"},
      {[](Foreign& f) {
         f.managed.dl_tensor.dtype = {3, 64, 1};
       },
       "code 3"},
      {[](Foreign& f) {
         f.managed.dl_tensor.dtype = {dlpack::kDLBool, 1, 1};
       },
       "1 bits"},
      {[](Foreign& f) { f.managed.dl_tensor.ndim = 9; }, "not 9"},
      {[](Foreign& f) { f.managed.dl_tensor.ndim = -1; }, "not -1"},
      {[](Foreign& f) { f.managed.dl_tensor.shape = nullptr; }, "no shape"},
      {[](Foreign& f) { f.managed.dl_tensor.data = nullptr; }, "no data"},
      {[](Foreign& f) { f.shape[0] = -2; }, "[-2, 3]"},
      {[](Foreign& f) {
         f.shape = {kHuge, kHuge};
       },
       "counted"},
      {[](Foreign& f) {
         f.shape = {kMaxElems + 1, 1};
       },
       "counted"},
      {[](Foreign& f) {
         f.strides = {kHuge, kHuge};
       },
       "counted"},
      {[](Foreign& f) {
         f.strides = {std::numeric_limits<int64_t>::min(), 1};
       },
       "counted"},
      {[](Foreign& f) { f.managed.dl_tensor.byte_offset = 2; }, "not aligned"},
  };
  for (const Case& c : cases) {
    Foreign foreign;
    c.spoil(foreign);
    try {
      from_dlpack(&foreign.managed);
      ADD_FAILURE() << "no error where one should say " << c.part;
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(c.part), std::string::npos) << error.what();
    }
    EXPECT_EQ(foreign.deleted, 1) << c.part;
  }
  EXPECT_THROW(from_dlpack(nullptr), InvalidArgument);
}

TEST(DlpackExport, DescribesTheTensorAndKeepsItsBytes) {
  const size_t before = cpu_allocator().stats().current_bytes;
  DLManagedTensorVersioned* managed;
  {
    const Tensor x = Tensor::from({1.0, 2.0, 3.0, 4.0, 5.0, 6.0}, {2, 3}).view_as({2, 2}, {1, 3}, 1);
    managed = to_dlpack(x);
    EXPECT_EQ(managed->dl_tensor.data, x.raw());
  }
  EXPECT_EQ(managed->version.major, 1u);
  EXPECT_EQ(managed->version.minor, 0u);
  EXPECT_EQ(managed->flags, 0u);
  const dlpack::DLTensor& given = managed->dl_tensor;
  EXPECT_EQ(given.device.device_type, dlpack::kDLCPU);
  EXPECT_EQ(given.ndim, 2);
  EXPECT_EQ(given.dtype.code, dlpack::kDLFloat);
  EXPECT_EQ(given.dtype.bits, 64);
  EXPECT_EQ(given.dtype.lanes, 1);
  EXPECT_EQ(std::vector<int64_t>(given.shape, given.shape + 2), (std::vector<int64_t>{2, 2}));
  EXPECT_EQ(std::vector<int64_t>(given.strides, given.strides + 2), (std::vector<int64_t>{1, 3}));
  EXPECT_EQ(given.byte_offset, 0u);
  const auto* data = static_cast<const double*>(given.data);
  EXPECT_EQ(data[0], 2);
  EXPECT_EQ(data[4], 6);
  EXPECT_GT(cpu_allocator().stats().current_bytes, before);
  managed->deleter(managed);
  EXPECT_EQ(cpu_allocator().stats().current_bytes, before);
}

TEST(DlpackExport, MarksReadOnlyMemory) {
  const std::vector<float> values{1, 2};
  DLManagedTensorVersioned* managed = to_dlpack(Tensor::borrow(std::span(values), {2}));
  EXPECT_EQ(managed->flags, dlpack::kReadOnly);
  managed->deleter(managed);
}

TEST(DlpackExport, RefusesTensorsWithoutBytes) {
  EXPECT_THROW(to_dlpack(Tensor()), InvalidArgument);
  EXPECT_THROW(to_dlpack(Tensor::empty({2}, DType::kF32, kNull)), InvalidArgument);
  const Tensor indices = Tensor::from({int64_t{0}}, {1, 1});
  EXPECT_THROW(to_dlpack(Tensor::sparse_coo(indices, Tensor::from({1.0f}, {1}), {5})), InvalidArgument);
}

TEST(Dlpack, EveryDTypeSurvivesTheRoundTrip) {
  // Code and bits as the DLPack header numbers them.
  const std::pair<int, int> expected[kDTypeCount] = {{6, 8},  {1, 8},  {0, 8},  {0, 16}, {0, 32}, {0, 64},
                                                     {2, 16}, {4, 16}, {2, 32}, {2, 64}, {5, 64}, {5, 128}};
  for (const DType dtype : kAllDTypes) {
    const Tensor x = Tensor::scalar(1, dtype).view_as({2, 1}, {0, 1}, 0);
    DLManagedTensorVersioned* managed = to_dlpack(x);
    EXPECT_EQ(managed->dl_tensor.dtype.code, expected[static_cast<size_t>(dtype)].first) << dtype;
    EXPECT_EQ(managed->dl_tensor.dtype.bits, expected[static_cast<size_t>(dtype)].second) << dtype;
    const Tensor back = from_dlpack(managed);
    EXPECT_EQ(back.dtype(), dtype);
    EXPECT_EQ(back.sizes(), x.sizes());
    EXPECT_EQ(back.strides(), x.strides());
    EXPECT_EQ(back.raw(), x.raw());
    EXPECT_EQ(back.to_vector<int>(), (std::vector<int>{1, 1}));
  }
}

TEST(Dlpack, EveryRankSurvivesTheRoundTrip) {
  for (size_t rank = 0; rank <= kMaxDims; ++rank) {
    const Tensor x = Tensor::empty(Shape(rank, 2), DType::kU8);
    EXPECT_EQ(from_dlpack(to_dlpack(x)).sizes(), x.sizes());
  }
  const Tensor none = from_dlpack(to_dlpack(Tensor::empty({2, 0}, DType::kU8)));
  EXPECT_EQ(none.sizes(), (Shape{2, 0}));
}

TEST(Dlpack, TheLastTensorMayDieOnAnotherThread) {
  Foreign foreign;
  Tensor x = from_dlpack(&foreign.managed);
  std::thread([mine = std::move(x)] { EXPECT_EQ(mine.elems(), 6); }).join();
  EXPECT_EQ(foreign.deleted, 1);
}

}  // namespace
}  // namespace chorale

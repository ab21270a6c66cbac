// What chorale_cuda.so gives out (base/shared_object.h): the runtime of NVIDIA GPUs, and their kernels row by row.
#include <string>
#include <vector>

#include "chorale/base/debug_level.h"
#include "chorale/base/error.h"
#include "chorale/device/cuda/compiler.h"
#include "chorale/device/cuda/context.h"
#include "chorale/device/cuda/cuda_peers.h"
#include "chorale/device/cuda/cuda_runtime.h"
#include "chorale/device/cuda/driver.h"
#include "chorale/device/cuda/fault.h"
#include "chorale/device/cuda/nccl.h"
#include "chorale/device/stream.h"
#include "chorale/eager/cuda/through_host.h"
#include "chorale/kernel/cuda/attention.h"
#include "chorale/kernel/cuda/batch_norm.h"
#include "chorale/kernel/cuda/convolution.h"
#include "chorale/kernel/cuda/creation.h"
#include "chorale/kernel/cuda/element_loop.h"
#include "chorale/kernel/cuda/family.h"
#include "chorale/kernel/cuda/fp8.h"
#include "chorale/kernel/cuda/image.h"
#include "chorale/kernel/cuda/index.h"
#include "chorale/kernel/cuda/loss.h"
#include "chorale/kernel/cuda/order.h"
#include "chorale/kernel/cuda/pointwise.h"
#include "chorale/kernel/cuda/product.h"
#include "chorale/kernel/cuda/random.h"
#include "chorale/kernel/cuda/reduce.h"
#include "chorale/kernel/cuda/rows.h"
#include "chorale/kernel/cuda/scan.h"
#include "chorale/kernel/cuda/shape.h"
#include "chorale/kernel/cuda/update.h"
#include "chorale/kernel/device_copy.h"
#include "chorale/kernel/kernel_maker.h"
#include "chorale/op/collective.h"
#include "chorale/op/kernels.h"
#include "chorale/op/table.h"

namespace chorale::eager {
namespace {

namespace on_gpu = kernel::cuda;
using kernel::KernelArgs;

// Errors name the op; with CHORALE_DEBUG=DETAIL every op is waited for, so that its own fault is not another's.
template <kernel::Kernel kKernel>
void named(const KernelArgs& args) {
  const cuda::OpScope scope(args.row ? args.row->name : nullptr);
  kKernel(args);
  if (debug_level() == DebugLevel::kDetail) [[unlikely]]
    synchronize(args.stream);
}

// Kernels that do not compute with complex numbers leave them to the host.
template <kernel::Kernel kKernel>
void named_for_reals(const KernelArgs& args) {
  is_complex(args.out[0].dtype()) ? named<run_through_host>(args) : named<kKernel>(args);
}

constexpr op::NamedKernel kKernels[] = {
    {"to", named<on_gpu::copy>},
    {"to_each", named<on_gpu::copy_each>},
    {"to_device", kernel::move_to_device},
    {"full", named<on_gpu::full>},
    {"full_like", named<on_gpu::full_like>},
    {"arange", named<on_gpu::arange>},
    {"linspace", named<on_gpu::linspace>},
    {"eye", named<on_gpu::eye>},
    {"cat", named<on_gpu::cat>},
    {"stack", named<on_gpu::stack>},
    {"flip", named<on_gpu::flip>},
    {"slice_backward", named<on_gpu::slice_backward>},
    {"diagonal_backward", named<on_gpu::diagonal_backward>},
    {"roll", named<on_gpu::roll>},
    {"tril", named<on_gpu::tril>},
    {"triu", named<on_gpu::triu>},
    {"pad", named<on_gpu::pad>},
    {"pad_backward", named_for_reals<on_gpu::pad_backward>},
    {"unfold_backward", named_for_reals<on_gpu::unfold_backward>},
    {"cumsum", named_for_reals<on_gpu::cumsum>},
    {"cumprod", named_for_reals<on_gpu::cumprod>},
    {"recurrence", named_for_reals<on_gpu::recurrence>},
    {"sort", named<on_gpu::sort>},
    {"topk", named<on_gpu::topk>},
    {"searchsorted", named<on_gpu::searchsorted>},
    {"difference_loss", named<on_gpu::difference_loss>},
    {"difference_loss_backward", named<on_gpu::difference_loss_backward>},
    {"binary_cross_entropy", named<on_gpu::binary_cross_entropy>},
    {"group_norm", named<on_gpu::group_norm>},
    {"group_norm_backward", named<on_gpu::group_norm_backward>},
    {"clip_by_value", named<on_gpu::clip_by_value>},
    {"sum", named<on_gpu::sum>},
    {"mean", named<on_gpu::mean>},
    {"prod", named<on_gpu::prod>},
    {"amax", named<on_gpu::amax>},
    {"amin", named<on_gpu::amin>},
    {"any", named<on_gpu::any>},
    {"all", named<on_gpu::all>},
    {"count_nonzero", named<on_gpu::count_nonzero>},
    {"max", named<on_gpu::max>},
    {"min", named<on_gpu::min>},
    {"argmax", named<on_gpu::argmax>},
    {"argmin", named<on_gpu::argmin>},
    {"norm", named<on_gpu::norm>},
    {"var", named<on_gpu::var>},
    {"std", named<on_gpu::std_deviation>},
    {"logsumexp", named<on_gpu::logsumexp>},
    {"matmul", named<on_gpu::matmul>},
    {"addmm", named<on_gpu::addmm>},
    {"linear", named<on_gpu::linear>},
    {"fp8_linear", named<on_gpu::fp8_linear>},
    {"fp8_linear_backward", named<on_gpu::fp8_linear_backward>},
    {"attention", named<on_gpu::attention>},
    {"attention_backward", named<on_gpu::attention_backward>},
    {"attention_backward_joined", named<on_gpu::attention_backward_joined>},
    {"uniform", named<on_gpu::uniform>},
    {"normal", named<on_gpu::normal>},
    {"randint", named<on_gpu::randint>},
    {"bernoulli", named<on_gpu::bernoulli>},
    {"dropout", named<on_gpu::dropout>},
    {"softmax", named<on_gpu::softmax>},
    {"log_softmax", named<on_gpu::log_softmax>},
    {"softmax_backward", named<on_gpu::softmax_backward>},
    {"log_softmax_backward", named<on_gpu::log_softmax_backward>},
    {"layer_norm", named<on_gpu::layer_norm>},
    {"layer_norm_backward", named<on_gpu::layer_norm_backward>},
    {"add_layer_norm", named<on_gpu::add_layer_norm>},
    {"add_layer_norm_backward", named<on_gpu::add_layer_norm_backward>},
    {"add_layer_norm_backward_summed", named<on_gpu::add_layer_norm_backward_summed>},
    {"rms_norm", named<on_gpu::rms_norm>},
    {"rms_norm_backward", named<on_gpu::rms_norm_backward>},
    {"cross_entropy", named<on_gpu::cross_entropy>},
    {"cross_entropy_backward", named<on_gpu::cross_entropy_backward>},
    {"gelu_erf_backward_summed", named<on_gpu::gelu_erf_backward_summed>},
    {"gelu_tanh_backward_summed", named<on_gpu::gelu_tanh_backward_summed>},
    {"cross_entropy_with_slopes", named<on_gpu::cross_entropy_with_slopes>},
    {"nll_loss", named<on_gpu::nll_loss>},
    {"nll_loss_backward", named<on_gpu::nll_loss_backward>},
    {"embedding", named<on_gpu::embedding>},
    {"embedding_backward", named<on_gpu::embedding_backward>},
    {"embedding_bag", named<on_gpu::embedding_bag>},
    {"embedding_bag_backward", named<on_gpu::embedding_bag_backward>},
    {"embedding_bag_weights_backward", named<on_gpu::embedding_bag_weights_backward>},
    {"index_select", named<on_gpu::index_select>},
    {"index_select_backward", named<on_gpu::index_select_backward>},
    {"index_add", named<on_gpu::index_add>},
    {"index_copy", named<on_gpu::index_copy>},
    {"index_fill", named<on_gpu::index_fill>},
    {"gather", named<on_gpu::gather>},
    {"gather_backward", named<on_gpu::gather_backward>},
    {"scatter", named<on_gpu::scatter>},
    {"scatter_fill", named<on_gpu::scatter_fill>},
    {"scatter_add", named<on_gpu::scatter_add>},
    {"index", named<on_gpu::index>},
    {"index_backward", named<on_gpu::index_backward>},
    {"index_put", named<on_gpu::index_put>},
    {"one_hot", named<on_gpu::one_hot>},
    {"update_sgd", named<on_gpu::update_sgd>},
    {"update_adam", named<on_gpu::update_adam>},
    {"update_adagrad", named<on_gpu::update_adagrad>},
    {"update_rmsprop", named<on_gpu::update_rmsprop>},
    {"update_adadelta", named<on_gpu::update_adadelta>},
    {"update_adamax", named<on_gpu::update_adamax>},
    {"update_nadam", named<on_gpu::update_nadam>},
    {"update_radam", named<on_gpu::update_radam>},
    {"update_asgd", named<on_gpu::update_asgd>},
    {"lamb_moments", named<on_gpu::lamb_moments>},
    {"lamb_apply", named<on_gpu::lamb_apply>},
    {"update_rprop", named<on_gpu::update_rprop>},
    {"power_sums", named<on_gpu::power_sums>},
    {"clip_by_norm", named<on_gpu::clip_by_norm>},
    {"unscale", named<on_gpu::unscale>},
    {"next_loss_scale", named<on_gpu::next_loss_scale>},
    {"batch_norm", named<on_gpu::batch_norm>},
    {"batch_norm_backward", named<on_gpu::batch_norm_backward>},
    {"batch_norm_relu", named<on_gpu::batch_norm_relu>},
    {"batch_norm_relu_backward", named<on_gpu::batch_norm_relu_backward>},
    {"relu_batch_norm_backward", named<on_gpu::relu_batch_norm_backward>},
    {"running_average", named<on_gpu::running_average>},
    {"max_pool", named<on_gpu::max_pool>},
    {"adaptive_max_pool", named<on_gpu::adaptive_max_pool>},
    {"max_pool_backward", named<on_gpu::max_pool_backward>},
    {"avg_pool", named<on_gpu::avg_pool>},
    {"avg_pool_backward", named<on_gpu::avg_pool_backward>},
    {"adaptive_avg_pool", named<on_gpu::adaptive_avg_pool>},
    {"adaptive_avg_pool_backward", named<on_gpu::adaptive_avg_pool_backward>},
    {"interpolate", named<on_gpu::interpolate>},
    {"interpolate_backward", named<on_gpu::interpolate_backward>},
    {"convolution", named<on_gpu::convolution>},
    {"convolution_transpose", named<on_gpu::convolution_transpose>},
    {"convolution_weight", named<on_gpu::convolution_weight>},
};

std::string explain(const cuda::Fault& fault) {
  const auto rows = op::all_ops();
  const auto number = static_cast<size_t>(fault.row);
  const char* const name = number < rows.size() ? rows[number]->name : "a kernel";
  if (fault.bound == 0) return concat("[", name, "] integer division by zero");
  if (fault.bound < 0) {
    return concat("[", name, "] the number at position ", fault.at,
                  " must be a probability, between 0 and 1; for logits there is binary_cross_entropy_with_logits");
  }
  return concat("[", name, "] ", fault.value, " at position ", fault.at, " is out of range: there are ", fault.bound);
}

kernel::KernelMaker& kernel_maker() {
  class Maker final : public kernel::KernelMaker {
   public:
    void make_ahead(Device device, base::FunctionRef<void()> launches) override {
      cuda::make_kernels_ahead(device, launches);
    }
  };
  static auto* const maker = new Maker;
  return *maker;
}

void add_cuda() {
  std::vector<op::NamedKernel> kernels(std::begin(kKernels), std::end(kKernels));
  for (const op::OpDef* row : op::all_ops()) {
    if (row->pointwise) kernels.push_back({row->name, named<on_gpu::pointwise>});
    // Groups know tensors of a device by themselves.
    if (op::communicates(*row)) kernels.push_back({row->name, row->cpu});
  }
  for (const char* const row : rows_through_host()) kernels.push_back({row, named<run_through_host>});
  auto runtime = cuda::make_runtime();
  kernel::cuda::set_row_number([](const KernelArgs& args) -> int64_t { return args.row->facts.number; });
  cuda::set_explain_fault(explain);
  op::add_kernels(DeviceType::kCuda, kernels);
  add_runtime(DeviceType::kCuda, std::move(runtime));
  set_peer_memory(DeviceType::kCuda, &cuda::peer_memory());
  set_collectives(DeviceType::kCuda, &cuda::nccl_collectives());
  kernel::set_element_loops(DeviceType::kCuda, &on_gpu::element_loops());
  kernel::set_kernel_maker(DeviceType::kCuda, &kernel_maker());
}

}  // namespace
}  // namespace chorale::eager

extern "C" {

void* chorale_cuda_module_1() {
  chorale::eager::add_cuda();
  return nullptr;
}

const char* chorale_cuda_trouble() {
  static std::string trouble;
  try {
    if (chorale::cuda::device_count() > 0) return nullptr;
    return "NVIDIA's driver is here, but it finds no GPU; nvidia-smi says more";
  } catch (const std::exception& error) {
    trouble = error.what();
    return trouble.c_str();
  }
}
}

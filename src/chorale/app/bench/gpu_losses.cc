// `chorale bench gpu-losses`: the losses of training steps of a GPT-2 whose first weights and batches are given, for
// bench/peers/gpu_losses.py, which lays them beside PyTorch's.
#include "chorale/app/bench/gpu_losses.h"

#include <filesystem>

#include "chorale/api/api.h"
#include "chorale/api/compile.h"
#include "chorale/api/replay.h"
#include "chorale/app/options.h"
#include "chorale/base/error.h"
#include "chorale/codegen/fused.h"
#include "chorale/io/npy.h"
#include "chorale/models/checkpoint.h"
#include "chorale/nn/fp8.h"
#include "chorale/optim/optim.h"

namespace chorale::app {
namespace bench_losses {
namespace {

struct Options {
  std::string model, tokens, out;
  bool bf16 = false, fp8 = false, compiled = false;
  double lr = 1e-4;
};

void run(const Options& options) {
  constexpr Device kGpu{DeviceType::kCuda, 0};
  const Tensor tokens = io::load_npy(options.tokens);  // [steps, batch, length + 1]
  CHORALE_CHECK(tokens.dims() == 3 && tokens.dtype() == DType::kI64, "[bench] ", options.tokens,
                " must hold i64 [steps, batch, length + 1], not ", tokens.dtype(), " ", tokens.sizes());
  models::Gpt2 model = models::load_gpt2(options.model);
  model.train();
  model.to(kGpu);
  if (options.fp8) nn::use_fp8(model);
  optim::AdamW optimizer(model.named_parameters(), {.lr = options.lr});
  const Replayed::Function train = [&](const std::vector<Tensor>& in) {
    optimizer.zero_grad();
    Tensor loss;
    {
      const Autocast scope(DType::kBF16, options.bf16);
      loss = cross_entropy(flatten(model(in[0]), 0, -2), in[1]);
    }
    backward(loss);
    optimizer.step();
    return std::vector{detach(loss)};
  };
  auto compiled = compile(train, {.whole_graph = true, .backend = codegen::fused()});
  Replayed replay([&](const std::vector<Tensor>& in) { return compiled(in); });
  std::vector<Tensor> losses;
  for (int64_t step = 0; step < tokens.size(0); ++step) {
    const Tensor batch = select(tokens, 0, step);
    const int64_t length = batch.size(1) - 1;
    const std::vector<Tensor> in = {to(narrow(batch, 1, 0, length), kGpu),
                                    to(flatten(narrow(batch, 1, 1, length)), kGpu)};
    losses.push_back(clone((options.compiled ? replay(in) : train(in))[0]));
  }
  io::save_npy(options.out, to(stack(losses), kCpu));
}

}  // namespace
}  // namespace bench_losses

void add_bench_gpu_losses(CLI::App& bench, Work& work) {
  using namespace bench_losses;
  CLI::App* command = bench.add_subcommand("gpu-losses", "Losses of a GPT-2 on a GPU, for bench/peers/gpu_losses.py");
  auto options = std::make_shared<Options>();
  command->add_option("--model", options->model, "a folder with config.json and model.safetensors")->required();
  command->add_option("--tokens", options->tokens, ".npy: i64 [steps, batch, length + 1]")->required();
  command->add_option("--out", options->out, ".npy: the losses")->required();
  command->add_option("--lr", options->lr, "AdamW's rate")->capture_default_str();
  command->add_flag("--bf16", options->bf16, "bf16 over f32 weights");
  command->add_flag("--fp8", options->fp8, "linear layers but the head multiply in 8 bits");
  command->add_flag("--compiled", options->compiled, "from compiled graphs, replayed");
  command->callback([options, &work] { work = [options] { run(*options); }; });
}

}  // namespace chorale::app

#include "chorale/train/text_task.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "chorale/base/host.h"
#include "chorale/io/file.h"

namespace chorale::train {

namespace {
void list_split_options(TrainOptions& common, OptionTable& table) {
  table.add({.name = "tp",
             .help = "ranks that share a model, each with a part of every layer (tensor parallel)",
             .target = &common.tp,
             .kind = OptionKind::kFree,
             .least = 1,
             .most = kMostRanks});
  table.add({.name = "dp",
             .help = "replicas of the model, which share each batch; 0: as many as ranks and --tp make",
             .target = &common.dp,
             .kind = OptionKind::kFree,
             .most = kMostWorld});
  table.add({.name = "sequence-parallel",
             .help = "with --tp: what is between layers is split along the tokens, to save memory",
             .target = &common.sequence_parallel,
             .kind = OptionKind::kFree});
  // How a start shares out its memory is nothing that a run must keep: its checkpoints are those of any other.
  table.add(
      {.name = "fsdp",
       .help = "ranks keep parts of parameters, gradients and optimizer states, and gather a layer while it computes",
       .target = &common.fsdp,
       .kind = OptionKind::kHere});
  table.add({.name = "hybrid",
             .help = "with --fsdp: replicas by ranks that share one, such as 2x4",
             .target = &common.hybrid,
             .kind = OptionKind::kHere,
             .value_name = "RxS"});
  table.add({.name = "copy-every",
             .help = "with --fsdp and --elastic: steps between copies that each rank keeps of its neighbour's part; 0: "
                     "none, the last checkpoint is enough. Where there are replicas no copies are made",
             .target = &common.copy_every,
             .kind = OptionKind::kFree,
             .most = kMostSteps});
  table.add({.name = "offload",
             .help = "with --fsdp: parts stay in the host's memory (on the CPU they are there anyway)",
             .target = &common.offload,
             .kind = OptionKind::kHere});
}
}  // namespace

double mean_loss(Task& task, Loader& batches, const comm::Group& group) {
  std::array<double, 2> sums = {};  // loss, batches
  int64_t index = 0;
  data::Example last;
  for (const auto& batch : batches) {
    last = batch;
    if (index++ % group.size() != group.rank()) continue;
    sums[0] += task.forward(task.here(batch)).loss.item<float>();
    sums[1] += 1;
  }
  // Ranks that gather a model together compute equally often: what one does beyond the last batch does not count.
  const int64_t rest = index % group.size();
  if (rest != 0 && group.rank() >= rest) task.forward(task.here(last));
  group.all_reduce(std::span<double>(sums)).wait();
  return sums[0] / sums[1];
}

void list_options(TextTaskOptions& options, const char* model, TrainOptions& common, OptionTable& table) {
  common.epochs = 3;
  common.batch = 16;
  common.warmup = 50;
  common.clip = 1;
  common.evaluate_every = common.checkpoint_every = 250;
  list_options(options.text, table);
  list_split_options(common, table);
  table.add({.name = "fp8",
             .help =
                 "linear layers but the head multiply in 8 bits, with --precision bf16: GPUs from Ada and Hopper on "
                 "do that faster, the CPU only imitates it, slowly",
             .target = &common.fp8});
  ShapeOptions& shape = options.shape;
  table.add({.name = "layers", .help = "of the model", .target = &shape.layers, .least = 1, .most = 1e5});
  table.add({.name = "heads", .help = "of each layer's attention", .target = &shape.heads, .least = 1, .most = 1e5});
  table.add(
      {.name = "width", .help = "numbers that stand for a token", .target = &shape.width, .least = 1, .most = 1e7});
  table.add(
      {.name = "dropout", .help = "share of numbers left out in training", .target = &shape.dropout, .most = 0.999});
  table.add({.name = "model-config",
             .help = concat("the model's shape from a config.json of ", model, " instead"),
             .target = &shape.model_config,
             .value_name = "FILE"});
}

void check_heads(int64_t heads, const TrainOptions& common) {
  CHORALE_CHECK(heads % common.tp == 0, "[train] --tp ", common.tp, " cannot share ", heads,
                " heads of attention equally; choose a divisor of ", heads);
}

void check_fits(int64_t model_vocabulary, int64_t tokenizer_vocabulary, int64_t model_context, int64_t context) {
  CHORALE_CHECK(model_vocabulary >= tokenizer_vocabulary, "[train] the model has ", model_vocabulary,
                " tokens, the tokenizer ", tokenizer_vocabulary, "; choose another --tokenizer or a smaller --vocab");
  CHORALE_CHECK(model_context >= context, "[train] the model sees ", model_context, " tokens at most, not ", context,
                "; choose a smaller --context");
}

namespace {

std::string gibibytes(double bytes) { return fmt::format("{:.4g} GiB", bytes / (1 << 30)); }

double ranks_here(const TrainOptions& common) { return static_cast<double>(std::max<int64_t>(common.ranks, 1)); }

}  // namespace

void check_memory(const models::ModelSize& size, const TrainOptions& common) {
  const bool two_moments = common.optimizer == "adamw" || common.optimizer == "adam" || common.optimizer == "lamb";
  const double states = two_moments ? 2 : 1, ranks = ranks_here(common);
  // Each of the ranks that share a model makes all of it before it keeps its part. Ranks of a fully sharded model never
  // have more than one copy together.
  const auto parts = static_cast<double>(common.tp);
  const double copies = common.tp == 1 ? 2 + states : std::max(1 + 1 / parts, (2 + states) / parts);
  const double needed = common.fsdp ? models::bytes_of(size, 2 + states) : ranks * models::bytes_of(size, copies);
  const auto there = static_cast<double>(memory_room().total_bytes);
  CHORALE_CHECK(needed <= there, "[train] a model of ", fmt::format("{:.4g}", size.parameters), " parameters takes ",
                gibibytes(needed), " for weights, gradients and the optimizer's states on ", ranks,
                ranks == 1 ? " rank" : " ranks", "; this machine has ", gibibytes(there),
                ". Choose a smaller model, or fewer ranks");
}

void settle(TextTaskOptions& options, const TrainOptions& common) {
  const std::string& init = common.init;
  CHORALE_CHECK(!common.fp8 || common.tp == 1,
                "[train] --fp8 is not for layers that --tp splits: their scale is of the "
                "whole; leave one of them out");
  // What can be wrong is found now, so that one process complains and not each rank.
  double bytes = 0;
  for (const std::string& file : options.text.files)
    bytes += static_cast<double>(io::MappedFile::open(file)->bytes().size());
  choose_tokenizer(options.text, init);
  // Each rank has the text, and its tokens.
  const double needed = ranks_here(common) * bytes * (options.text.tokenizer == "bytes" ? 5 : 2);
  const auto there = static_cast<double>(memory_room().total_bytes);
  CHORALE_CHECK(needed <= there, "[train] a text of ", gibibytes(bytes), " takes ", gibibytes(needed),
                " of memory or more; this machine has ", gibibytes(there), ". Choose a smaller one");
  const ShapeOptions& shape = options.shape;
  std::string& config = options.shape.model_config;
  if (config.starts_with('{')) return;  // of a run that goes on
  if (config.empty() && init.empty()) {
    CHORALE_CHECK(shape.width % shape.heads == 0, "[train] a width of ", shape.width, " cannot be dealt to ",
                  shape.heads, " heads equally; choose a multiple of ", shape.heads);
    return;
  }
  options.shape.config_source = config.empty() ? (std::filesystem::path(init) / "config.json").string() : config;
  const auto file = io::MappedFile::open(options.shape.config_source);
  const size_t begin = file->text().find('{');
  CHORALE_CHECK(begin != std::string_view::npos, "[train] ", options.shape.config_source,
                " is no config.json of a model: it should hold an object");
  config = file->text().substr(begin);
}

}  // namespace chorale::train

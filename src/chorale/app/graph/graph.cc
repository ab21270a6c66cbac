// `chorale graph RUN|FILE`: compiled graphs that were saved, as a page: nodes, kernels, where values lie, and with
// --time how long each kernel takes.
#include <fmt/format.h>

#include <filesystem>
#include <map>
#include <memory>

#include "chorale/api/api.h"
#include "chorale/app/commands.h"
#include "chorale/app/graph/graph_page.h"
#include "chorale/base/error.h"
#include "chorale/base/generator.h"
#include "chorale/base/printable.h"
#include "chorale/codegen/fused.h"
#include "chorale/io/file.h"
#include "chorale/trace/trace.h"

namespace chorale::app {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMostBytes = size_t{1} << 30;  // of a file, which is searched as a whole

// Texts of graphs in a file: what print() gives, with any other lines between them (explain() has some).
std::vector<std::string> texts_in(const fs::path& file) {
  const std::shared_ptr<const io::MappedFile> mapped = io::MappedFile::open(file);
  const std::string_view all = mapped->text();
  CHORALE_CHECK(all.size() <= kMostBytes, "[graph] '", printable(file.native()), "' has ", all.size(),
                " bytes; files of graphs have at most ", kMostBytes);
  std::vector<std::string> texts;
  for (size_t at = 0; (at = all.find("graph", at)) != std::string::npos;) {
    const std::string_view behind = all.substr(at + 5, 1);  // a head, or symbols before it
    if ((at != 0 && all[at - 1] != '\n') || (behind != "(" && behind != "[")) {
      ++at;
      continue;
    }
    const size_t end = all.find("\n}\n", at);
    CHORALE_CHECK(end != std::string::npos, "[graph] '", printable(file.native()), "' ends inside of a graph");
    texts.emplace_back(all.substr(at, end + 3 - at));
    at = end + 3;
  }
  return texts;
}

// The file itself, or of a run what its compiled functions left.
std::vector<fs::path> files_of(const fs::path& given) {
  std::error_code error;
  if (!fs::is_directory(given, error)) {
    CHORALE_CHECK(fs::is_regular_file(given, error), "[graph] '", printable(given.native()),
                  "' is no file with graphs and no folder of a run");
    return {given};
  }
  std::vector<fs::path> files;
  if (fs::is_directory(given / "graphs", error)) {
    for (const fs::directory_entry& entry : fs::directory_iterator(given / "graphs")) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  CHORALE_CHECK(!files.empty(), "[graph] the run in '", printable(given.native()),
                "' has no graphs: only one that was started with --compile leaves some, in its folder graphs");
  return files;
}

graph::Graph parsed(const std::string& text) {
  graph::Graph graph = graph::parse(text);
  try {
    graph::verify(graph);
  } catch (const InternalError&) {  // of ours, were the graph not from a file
    throw InvalidArgument(
        "a graph in it does not hold together, such as a value that is read but never made; was it edited?");
  }
  return graph;
}

// Microseconds by kernel, of a run on made data: the median of some.
std::vector<double> times_of(const graph::Program& program, int runs) {
  std::vector<Tensor> in;
  for (const uint32_t x : program.graph().inputs) {
    const graph::Value& value = program.graph().values[x];
    const Tensor made = Tensor::empty_strided(value.sizes, value.strides, value.dtype);
    if (is_floating(value.dtype)) {
      uniform_(made, 0.1, 1);
    } else {
      zero_(made);
    }
    in.push_back(made);
  }
  std::vector<Generator> generators(program.graph().generators);
  std::vector<Generator*> pointers;
  pointers.reserve(generators.size());
  for (Generator& generator : generators) pointers.push_back(&generator);
  std::vector<std::vector<double>> all(program.kernels());
  for (int i = 0; i <= runs; ++i) {
    std::vector<Tensor> out(program.graph().outputs.size());
    trace::start(program.kernels() + 1024);
    program.run(in, pointers, out);
    size_t kernel = 0;
    for (const trace::Event& event : trace::stop()) {
      if (!event.name.starts_with("kernel ") || kernel >= all.size()) continue;
      const double us = std::chrono::duration<double, std::micro>(event.end - event.start).count();
      if (i > 0) all[kernel].push_back(us);  // the first run makes primitives
      ++kernel;
    }
  }
  std::vector<double> medians;
  for (std::vector<double>& times : all) {
    std::sort(times.begin(), times.end());
    medians.push_back(times.empty() ? 0 : times[times.size() / 2]);
  }
  return medians;
}

ShownGraph shown_graph(const std::string& text, const fs::path& file, bool fused, int runs) {
  graph::Graph graph = parsed(text);
  std::vector<KernelSource> sources;
  if (fused) {
    for (const codegen::KernelText& kernel : codegen::kernels_of(codegen::simplify_and_fuse(graph))) {
      sources.push_back({kernel.name, kernel.text});
    }
  }
  ShownGraph shown{
      file.filename().string(),
      fused ? codegen::fuse_and_compile(std::move(graph)) : std::make_shared<const graph::Program>(std::move(graph)),
      std::move(sources),
      {}};
  if (runs > 0) shown.microseconds = times_of(*shown.program, runs);
  return shown;
}

}  // namespace

void add_graph(CLI::App& program, Work& work) {
  CLI::App* command = program.add_subcommand("graph", "Show compiled graphs that were saved, as a page");
  struct Options {
    fs::path given, out;
    bool fused = false;
    int time = 0;
  };
  auto options = std::make_shared<Options>();
  command->add_option("graphs", options->given, "a file with graphs as explain() prints them, or the folder of a run")
      ->required();
  command->add_option("-o,--out", options->out,
                      "the file to write; GRAPHS.html, or graphs.html in the folder of the run");
  command->add_flag("--fused", options->fused, "as generated kernels run it");
  command->add_option("--time", options->time, "run each graph so often on made data, and say how long kernels take")
      ->check(CLI::Range(1, 1000));
  command->callback([options, &work] {
    work = [options] {
      std::vector<ShownGraph> shown;
      for (const fs::path& file : files_of(options->given)) {
        for (const std::string& text : texts_in(file)) {
          try {
            shown.push_back(shown_graph(text, file, options->fused, options->time));
          } catch (const InvalidArgument& error) {
            throw InvalidArgument(concat("[graph] '", printable(file.native()), "': ", error.what()));
          }
        }
      }
      CHORALE_CHECK(!shown.empty(), "[graph] there is no graph in '", printable(options->given.native()),
                    "'; one begins with 'graph(' at the beginning of a line");
      fs::path file = options->out;
      if (file.empty()) {
        file = fs::is_directory(options->given) ? options->given / "graphs.html"
                                                : fs::path(options->given.string() + ".html");
      }
      io::write_file(file, graph_page(shown));
      fmt::print("{}\n", file.string());
    };
  });
}

}  // namespace chorale::app

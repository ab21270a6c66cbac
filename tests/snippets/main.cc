// Runs the code blocks of docs/usage, one after the other, on two ranks:  chorale run -n 2 ./doc_snippets
#include <algorithm>
#include <filesystem>
#include <sstream>
#include <string_view>

#include "tests/snippets/snippets.h"

namespace snippets {

std::vector<Snippet>& all() {
  static std::vector<Snippet> list;
  return list;
}

namespace {

// "…" in a page stands for anything.
bool matches(std::string_view text, std::string_view pattern) {
  constexpr std::string_view kAnything = "…";
  const size_t gap = pattern.find(kAnything);
  if (gap == std::string_view::npos) return text == pattern;
  if (text.substr(0, gap) != pattern.substr(0, gap)) return false;
  const std::string_view rest = pattern.substr(gap + kAnything.size());
  for (size_t at = gap; at <= text.size(); ++at) {
    if (matches(text.substr(at), rest)) return true;
  }
  return false;
}

std::string trimmed(std::string text) {
  while (!text.empty() && text.back() == '\n') text.pop_back();
  return text;
}

// What is wrong with it, or nothing.
std::string run(const Snippet& snippet, chorale::comm::Group& group) {
  std::ostringstream printed;
  std::streambuf* console = std::cout.rdbuf(printed.rdbuf());
  std::string error;
  try {
    snippet.run(group);
  } catch (const std::exception& thrown) {
    error = thrown.what();
  }
  std::cout.rdbuf(console);
  if (!snippet.error && !error.empty()) return "failed:\n  " + error;
  if (snippet.error && error.empty()) return "was to fail with\n  " + std::string(snippet.error) + "\nand did not fail";
  // Ranks say different things; pages show what the first one says.
  if (group.rank() != 0) return "";
  if (snippet.error && !matches(error, snippet.error)) {
    return "was to fail with\n  " + std::string(snippet.error) + "\nand failed with\n  " + error;
  }
  if (snippet.output && !matches(trimmed(printed.str()), snippet.output)) {
    return "was to print\n" + std::string(snippet.output) + "\nand printed\n" + trimmed(printed.str());
  }
  return "";
}

}  // namespace
}  // namespace snippets

int main() {
  using namespace snippets;
  chorale::comm::World world;
  world.init();
  chorale::comm::Group& group = world.group();
  const auto folder = std::filesystem::temp_directory_path() / ("chorale-snippets-" + std::to_string(getpid()));
  std::filesystem::create_directories(folder);
  std::filesystem::current_path(folder);
  int failed = 0;
  std::stable_sort(all().begin(), all().end(),
                   [](const Snippet& a, const Snippet& b) { return std::string_view(a.where) < b.where; });
  for (const Snippet& snippet : all()) {
    const std::string wrong = run(snippet, group);
    if (wrong.empty()) continue;
    ++failed;
    std::cerr << snippet.where << " " << wrong << "\n";
  }
  std::filesystem::current_path("/");
  std::filesystem::remove_all(folder);
  if (group.rank() == 0) std::cout << all().size() - static_cast<size_t>(failed) << " snippets as the pages say\n";
  return failed == 0 ? 0 : 1;
}

#include "chorale/api/shared_sizes.h"

#include <sstream>

#include "chorale/api/agreement.h"
#include "chorale/api/compile.h"
#include "chorale/base/error.h"

namespace chorale::compiled {

std::string SeenSizes::text_of(const std::vector<Argument>& arguments) {
  std::string text;
  for (const Argument& argument : arguments) {
    if (const auto* number = std::get_if<int64_t>(&argument.value)) {
      text += concat(argument.source(), "\tnumber ", *number, "\n");
    }
    const auto* x = std::get_if<Tensor>(&argument.value);
    if (!x || !x->defined()) continue;
    text += concat(argument.source(), "\ttensor");
    for (const int64_t size : x->sizes()) text += concat(" ", size);
    text += "\n";
  }
  return text;
}

void SeenSizes::merge(const std::string& text) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const size_t tab = line.find('\t');
    CHORALE_INVARIANT(tab != std::string::npos, "[compile] a rank told of its arguments `", line, "`");
    std::istringstream words(line.substr(tab + 1));
    std::string kind;
    words >> kind;
    Entry now;
    std::vector<Atom> numbers;
    for (int64_t number = 0; words >> number;) numbers.emplace_back(number);
    if (kind == "tensor") {
      now.sizes = std::move(numbers);
    } else {
      now.number = numbers.at(0);
    }
    const auto [at, is_new] = seen_.try_emplace(line.substr(0, tab), now);
    if (is_new) continue;
    Entry& before = at->second;
    if (before.number != now.number) before.number = {};
    if (!before.sizes || !now.sizes || before.sizes->size() != now.sizes->size()) {
      before.sizes = {};
      continue;
    }
    for (size_t d = 0; d < now.sizes->size(); ++d) {
      if ((*before.sizes)[d] != (*now.sizes)[d]) (*before.sizes)[d] = {};
    }
  }
}

void SeenSizes::share(const comm::Group& group, const std::vector<Argument>& arguments) {
  for (const std::string& text : gather_texts(group, text_of(arguments))) merge(text);
}

void SeenSizes::mark(std::vector<SizeSource>& sources) const {
  for (SizeSource& source : sources) {
    if (source.mark != Mark::kNone) continue;
    const size_t of_dimension = source.name.find(".size(");
    const auto found = seen_.find(source.name.substr(0, of_dimension));
    if (found == seen_.end()) continue;
    const Entry& entry = found->second;
    const bool changes = of_dimension == std::string::npos
                             ? !entry.number
                             : !entry.sizes || !(*entry.sizes)[static_cast<size_t>(source.dim)];
    if (changes) source.mark = Mark::kShared;
  }
}

}  // namespace chorale::compiled

// Compiled functions: what their graphs are at other sizes.
#include <map>

#include "chorale/api/variant.h"
#include "chorale/base/error.h"

namespace chorale {
namespace compiled {

using graph::Recording;

namespace {

// A tensor of another size for the length of a scope in which nothing sees its bytes.
class OtherSizes {
 public:
  OtherSizes(const Tensor& x, const Shape& sizes) : x_(x), sizes_(x.sizes()), strides_(x.strides()) { show(sizes, {}); }
  ~OtherSizes() { show(sizes_, strides_); }
  OtherSizes(const OtherSizes&) = delete;
  OtherSizes& operator=(const OtherSizes&) = delete;

 private:
  void show(const Shape& sizes, const Strides& strides) {
    Tensor::Impl& impl = *x_.impl();
    impl.sizes = sizes;
    impl.strides = strides.empty() ? contiguous_strides(sizes) : strides;
    impl.elems = count_elems(sizes);
  }
  Tensor x_;
  Shape sizes_;
  Strides strides_;
};

}  // namespace

// What follows from dimensions that are symbols from the start: the function is traced again for each, twice as long. A
// dimension that must be what it is, because an op says so, is no symbol.
void Frame::probe(const std::vector<Argument>& arguments, Body body) {
  Family* family = nullptr;
  std::vector<std::vector<SizeSource>> symbols;
  {
    const std::lock_guard lock(state_->mutex);
    family = state_->families.back().family.get();
    if (!family->is_learnt()) symbols = family->symbols();
  }
  std::vector<Family::Example> examples;
  for (const std::vector<SizeSource>& symbol : symbols) {
    std::map<size_t, Shape> sizes;
    for (const SizeSource& source : symbol) {
      if (source.argument == SIZE_MAX) return;  // a number cannot be another: the next size tells
      const Tensor& x = std::get<Tensor>(arguments[source.argument].value);
      if (!x.is_contiguous()) return;
      sizes.emplace(source.argument, x.sizes()).first->second[static_cast<size_t>(source.dim)] *= 2;
    }
    std::vector<std::unique_ptr<OtherSizes>> others;
    others.reserve(sizes.size());
    for (const auto& [argument, shape] : sizes) {
      others.push_back(std::make_unique<OtherSizes>(std::get<Tensor>(arguments[argument].value), shape));
    }
    std::vector<Tensor> results;
    const auto keep = [&](const std::shared_ptr<Segment>& segment, const Recording& recording) {
      examples.push_back({sources_of(recording, *segment, arguments, state_->options), segment->texts()});
      return false;
    };
    try {
      trace(arguments, body, keep, results);
    } catch (const InvalidArgument& error) {
      const std::lock_guard lock(state_->mutex);
      for (const SizeSource& source : symbol) {
        family->fix(source.name);
        state_->report.fixed.push_back(concat(source.name, " must be ", source.value, ": ", error.what()));
      }
    }
  }
  if (examples.empty()) return;
  const std::lock_guard lock(state_->mutex);
  state_->teach(*family, examples);
}

}  // namespace compiled
}  // namespace chorale

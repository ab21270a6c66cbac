// Compiled functions: whole graphs that are called with nothing in between (Note [Direct calls] in api/variant.h), and
// gradients that are written over.
#include <algorithm>

#include "chorale/api/variant.h"
#include "chorale/autograd/autograd.h"
#include "chorale/base/small_vector.h"

namespace chorale::compiled {
namespace {

// Whether a tensor's memory may hold a new value of that layout: nobody else can see it.
bool is_free(const Tensor& x, const Tensor& like, int64_t known = 1) {
  return x.defined() && x.use_count() == known && !x.extension() && !autograd::slot_of(x) && x.offset() == 0 &&
         x.storage()->use_count() == 1 && x.device() == like.device() && x.dtype() == like.dtype() &&
         x.sizes() == like.sizes() && x.is_contiguous();
}

}  // namespace

void Frame::Variant::make_direct() {
  std::optional<Segment::Direct> of = segment->direct();
  if (!of || once) return;
  const auto is_made = [&](const Left& left) { return left.from == Left::From::kWanted && left.root == kNowhere; };
  for (const Left& left : results) {
    if (left.whole) return;
    if (!is_made(left) && !(left.from == Left::From::kOutside && left.is_itself && left.root == kNowhere)) return;
  }
  if (replaced.size() != left_gradients.size()) return;
  auto made = std::make_unique<Direct>();
  for (const auto& [leaf, left] : left_gradients) {
    if (!is_made(left) || left.whole || !segment->lies_in_order(left.index)) return;
    made->gradients.push_back(of->wanted[left.index]);
  }
  for (const size_t p : of->inputs) {
    if (from_argument[p] != kNowhere || gradient_of[p].defined()) made->changing.emplace_back(made->in.size(), p);
    made->in.push_back(outside[p]);
  }
  made->out.resize(of->program->graph().outputs.size());
  made->of = std::move(*of);
  direct = std::move(made);
}

// Says no where another call is at it, or where an argument is not what it looks like.
bool Frame::run_direct(const Variant& variant, const std::vector<Argument>& arguments, std::vector<Tensor>& results) {
  Variant::Direct& direct = *variant.direct;
  const std::unique_lock lock(direct.mutex, std::try_to_lock);
  if (!lock) return false;
  const auto argument = [&](size_t at) -> const Tensor& { return std::get<Tensor>(arguments[at].value); };
  for (const auto& [place, p] : direct.changing) {
    if (variant.from_argument[p] != kNowhere && argument(variant.from_argument[p]).extension()) return false;
  }
  struct Release {
    Variant::Direct& direct;
    ~Release() {
      for (const auto& [place, p] : direct.changing) direct.in[place] = {};
      for (Tensor& x : direct.out) x = {};
    }
  } const release{direct};
  for (const auto& [place, p] : direct.changing) direct.in[place] = variant.outside_at(p, arguments);
  const auto& gradients = variant.left_gradients;
  SmallVector<size_t, 8> fresh;
  for (size_t g = 0; g < gradients.size(); ++g) {
    const Tensor& leaf = gradients[g].first;
    Tensor old = chorale::gradient(leaf);
    if (is_free(old, leaf, 2)) {
      direct.out[direct.gradients[g]] = std::move(old);
      continue;
    }
    if (old.defined()) set_gradient(leaf, {});
    fresh.push_back(g);
  }
  try {
    direct.of.program->run(direct.in, variant.segment->generators(), direct.out);
  } catch (...) {
    for (const auto& [leaf, left] : gradients) set_gradient(leaf, {});
    throw;
  }
  for (const size_t g : fresh) set_gradient(gradients[g].first, direct.out[direct.gradients[g]]);
  for (const size_t p : variant.written) variant.outside_at(p, arguments).storage()->note_write("a compiled graph");
  results.reserve(variant.results.size());
  for (const Left& left : variant.results) {
    results.push_back(left.from == Left::From::kWanted ? direct.out[direct.of.wanted[left.index]]
                                                       : variant.outside_at(left.index, arguments));
  }
  return true;
}

// Lets go of gradients that are replaced anyway, so that old and new ones are not there at once; new ones lie where the
// old ones were.
void Frame::give_up_gradients(const Variant& variant, std::vector<Tensor>& free) {
  for (const size_t at : variant.replaced) {
    const auto& [leaf, left] = variant.left_gradients[at];
    const Tensor old = chorale::gradient(leaf);
    if (!old.defined()) continue;
    set_gradient(leaf, {});
    if (left.from != Left::From::kWanted || left.root != kNowhere || !is_free(old, leaf)) continue;
    if (!variant.segment->lies_in_order(left.index)) continue;
    if (free.size() <= left.index) free.resize(left.index + 1);
    free[left.index] = old;
  }
}

}  // namespace chorale::compiled

// Modules made of modules. Lists and dictionaries of modules of one type need no class: a std::vector and a std::map
// are members like any other.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "chorale/nn/module.h"

namespace chorale::nn {

template <class M>
using ModuleList = std::vector<M>;
template <class M>
using ModuleDict = std::map<std::string, M>;

// Layers of any types, each a function of one tensor, one behind the other:
//   Sequential net(Linear(20, 32), ReLU(), Linear(32, 10));
// Their names are their places: "0.weight", "2.weight".
class Sequential : public Module {
 public:
  template <class... Layers>
  requires(std::is_base_of_v<Module, Layers>&&...) explicit Sequential(Layers... layers) {
    (add(std::move(layers)), ...);
  }
  Sequential(const Sequential& other);
  Sequential(Sequential&&) = default;
  Sequential& operator=(const Sequential& other) { return *this = Sequential(other); }
  Sequential& operator=(Sequential&&) = default;

  template <class Layer>
  Layer& add(Layer layer) {
    auto step = std::make_unique<StepOf<Layer>>(std::move(layer));
    Layer& added = step->layer;
    steps_.push_back(std::move(step));
    return added;
  }
  size_t size() const { return steps_.size(); }
  // The layer at a place; StateError if it is of another type.
  Module& operator[](size_t place) const;
  template <class Layer>
  Layer& at(size_t place) const {
    auto* layer = dynamic_cast<Layer*>(&(*this)[place]);
    CHORALE_CHECK_STATE(layer != nullptr, "[Sequential] layer ", place, " is a ", (*this)[place].type_name());
    return *layer;
  }

  Tensor forward(const Tensor& x);
  // StateError at a layer whose forward is not const.
  Tensor forward(const Tensor& x) const;
  void visit_members(MemberVisitor& visitor) override;
  CHORALE_MODULE_CALL(Sequential)

 private:
  struct Step {
    virtual ~Step() = default;
    virtual Module& module() = 0;
    virtual Tensor call(const Tensor& x) = 0;
    virtual Tensor call(const Tensor& x) const = 0;
    virtual std::unique_ptr<Step> copy() const = 0;
  };
  template <class Layer>
  struct StepOf final : Step {
    explicit StepOf(Layer from) : layer(std::move(from)) {}
    Module& module() override { return layer; }
    Tensor call(const Tensor& x) override { return layer(x); }
    Tensor call(const Tensor& x) const override {
      if constexpr (requires { layer(x); }) {
        return layer(x);
      } else {
        throw StateError(concat("[Sequential] is called through a const module, but the forward of its layer ",
                                layer.type_name(), " is not const"));
      }
    }
    std::unique_ptr<Step> copy() const override { return std::make_unique<StepOf>(layer); }
    Layer layer;
  };

  std::vector<std::unique_ptr<Step>> steps_;
};

struct Identity : Module {
  CHORALE_MODULE(Identity)
  Tensor forward(const Tensor& x) const { return x; }
};

// Dimensions `start` to `end`, inclusive, become one.
class Flatten : public Module {
 public:
  explicit Flatten(int64_t start = 1, int64_t end = -1) : start_(start), end_(end) {}
  Tensor forward(const Tensor& x) const;
  CHORALE_MODULE(Flatten)

 private:
  int64_t start_, end_;
};

}  // namespace chorale::nn

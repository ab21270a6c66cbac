// A module on another worker, that is called from here.
//
//   rpc::RemoteModule<nn::Linear> layer(agent, "server", int64_t{10}, int64_t{5});
//   Tensor y = layer.forward(x);
//   rpc::DistributedOptimizer<optim::Sgd> optimizer(agent, layer.remote_parameters(), {.lr = 0.1});
//
// Its worker serves it: rpc::add(options.serves, rpc::module_functions<nn::Linear, int64_t, int64_t>()). The module's
// forward must be one function, not several of that name. What else a module can do is done on its worker, in functions
// that are served there.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "chorale/nn/module.h"
#include "chorale/rpc/agent.h"

namespace chorale::rpc {

// "worker", "worker/cpu", "rank:1", "rank:1/cpu". InvalidArgument for anything else.
struct RemoteDevice {
  std::string worker;  // by name,
  int rank = -1;       // or by number
  std::string device = "cpu";
  CHORALE_MESSAGE(RemoteDevice, worker, rank, device)
  friend bool operator==(const RemoteDevice&, const RemoteDevice&) = default;
  To to() const { return rank >= 0 ? To(rank) : To(worker); }
};
RemoteDevice parse_remote_device(const std::string& text);

// ---- served by the module's worker

template <class M>
std::vector<RRef<Tensor>> parameters_of(const RRef<M>& module) {
  std::vector<RRef<Tensor>> references;
  for (const Tensor& parameter : module.local_value().parameters()) references.push_back(here().reference(parameter));
  return references;
}
template <class M>
void set_training(const RRef<M>& module, bool on) {
  module.local_value().train(on);
}
template <class M>
bool is_training(const RRef<M>& module) {
  return module.local_value().is_training();
}
template <class M, class... Args>
std::vector<Served> module_functions() {
  return {remote<make<M, Args...>>, remote<&M::forward>, remote<parameters_of<M>>, remote<set_training<M>>,
          remote<is_training<M>>};
}

template <class M>
class RemoteModule {
  static_assert(std::is_base_of_v<nn::Module, M>, "a remote module is a module: derive from nn::Module");

 public:
  // Makes the module there; what its constructor throws, the first use says.
  template <class... Args>
  RemoteModule(const Agent& agent, const std::string& where, const Args&... args)
      : agent_(agent),
        on_(parse_remote_device(where)),
        module_(agent_.template remote<make<M, Args...>>(on_.to(), args...)) {}
  // Stands for the module of a reference that there is already.
  RemoteModule(const Agent& agent, const RRef<M>& module)
      : RemoteModule(agent, RemoteDevice{.worker = module.owner().name}, module) {}
  RemoteModule(const Agent& agent, RemoteDevice on, const RRef<M>& module)
      : agent_(agent), on_(std::move(on)), module_(module) {}

  template <class... Args>
  auto forward(const Args&... args) {
    return agent_.template call<&M::forward>(module_, args...);
  }
  template <class... Args>
  auto forward_async(const Args&... args) {
    return agent_.template call_async<&M::forward>(module_, args...);
  }
  std::vector<RRef<Tensor>> remote_parameters() {
    return agent_.template call<parameters_of<M>>(module_.owner(), module_);
  }
  void train(bool on = true) { agent_.template call<set_training<M>>(module_.owner(), module_, on); }
  void eval() { train(false); }
  bool is_training() { return agent_.template call<rpc::is_training<M>>(module_.owner(), module_); }
  const RRef<M>& module_rref() const { return module_; }
  const RemoteDevice& on() const { return on_; }

 private:
  Agent agent_;
  RemoteDevice on_;
  RRef<M> module_;
};

// What travels: where it is, and the reference.
template <class M>
struct Codec<RemoteModule<M>> {
  static constexpr size_t kLeast = 32;
  static std::string name() { return concat("remote_module<", type_name<M>(), ">"); }
  static void write(Writer& writer, const RemoteModule<M>& value) {
    rpc::write(writer, value.on());
    rpc::write(writer, value.module_rref());
  }
  static RemoteModule<M> read(Reader& reader) {
    auto on = rpc::read<RemoteDevice>(reader);
    const RRef<M> module = rpc::read<RRef<M>>(reader);
    return {agent_of(*reader.core()), std::move(on), module};
  }
};

}  // namespace chorale::rpc

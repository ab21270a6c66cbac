// Data-parallel layers inside distributed autograd, in six processes: four trainers, a server that holds an embedding
// table and a layer, and a master that tells the trainers what to do. All numbers are whole or halves, so that each
// step can be followed by hand, and is checked here.
//
//   chorale run -n 6 ./six_processes
#include <iostream>
#include <optional>

#include "chorale/chorale.h"

using namespace chorale;

constexpr int kTrainers = 4;

// A layer without bias, whose weights are all ones, but -1 in the corner.
struct Dense : nn::Module {
  Dense(int64_t in, int64_t out) : weight(ones({out, in})) { weight.data<float>()[0] = -1; }
  nn::Parameter weight;
  CHORALE_MODULE(Dense, weight)
  Tensor forward(const Tensor& x) { return matmul(x, transpose(weight, 0, 1)); }
};

// What the server has.
struct Table : nn::Module {
  nn::Parameter weight{full({2, 3}, 0.5, DType::kF32)};
  CHORALE_MODULE(Table, weight)
  Tensor forward(const Tensor& rows) { return embedding_bag(rows, weight, arange(0, rows.size(0), 1, DType::kI64)); }
};
struct ServerNet : nn::Module {
  Dense dense{5, 3};
  CHORALE_MODULE(ServerNet, dense)
  Tensor forward(const Tensor& x) { return relu(dense(x)); }
};

// What every trainer has: a first and a last layer of its own, and between them the two parts on the server.
struct Hybrid : nn::Module {
  Hybrid(const rpc::RemoteModule<Table>& rows, const rpc::RemoteModule<ServerNet>& layer) : table(rows), net(layer) {}
  rpc::RemoteModule<Table> table;
  rpc::RemoteModule<ServerNet> net;
  Dense first{2, 2}, last{3, 1};
  CHORALE_MODULE(Hybrid, first, last)
  Tensor forward(const Tensor& xy, const Tensor& rows) {
    return last(net.forward(cat({first(xy), table.forward(rows)}, 1)));
  }
};

// What one step of a trainer gives; the gradients are those of its context.
struct Step {
  std::vector<float> outputs;
  float loss = 0;
  std::vector<float> first, last, net, table;
  CHORALE_MESSAGE(Step, outputs, loss, first, last, net, table)
  friend bool operator==(const Step&, const Step&) = default;
};

struct ServerGradients {
  Tensor net, table;
  CHORALE_MESSAGE(ServerGradients, net, table)
  // Those of the server's parameters in a context.
  static ServerGradients get(uint64_t context, const rpc::RRef<ServerNet>& net, const rpc::RRef<Table>& table) {
    auto& gradients = static_cast<dist_autograd::Contexts&>(rpc::here()).get(context)->gradients;
    return {gradients.gradient(net.local_value().dense.weight), gradients.gradient(table.local_value().weight)};
  }
};

struct Trainer {
  static inline const comm::Group* world = nullptr;
  static inline std::optional<Hybrid> alone;
  static inline std::optional<parallel::DistributedDataParallel<Hybrid>> together;

  static void set_up(bool data_parallel, const rpc::RemoteModule<Table>& table,
                     const rpc::RemoteModule<ServerNet>& net) {
    alone.reset();
    together.reset();
    // All six processes take part in making the trainers' group.
    if (data_parallel) {
      together.emplace(Hybrid(table, net), world->new_group({0, 1, 2, 3}));
    } else {
      alone.emplace(table, net);
    }
  }
  // The 16 examples are those of four trainers, four each: (x, y) twice, with row 0 and row 1 of the table.
  static Step step() {
    rpc::Agent agent = rpc::here();
    const int trainer = agent.info().id;
    const float value = trainer < 2 ? -1 : 1, x = trainer % 2 == 0 ? -value : value;
    const Tensor xy = Tensor::from<float>({x, value, x, value, x, -value, x, -value}, {4, 2});
    const Tensor rows = Tensor::from<int64_t>({0, 1, 0, 1}, {4});
    dist_autograd::Context context(agent);
    const Tensor outputs = alone ? (*alone)(xy, rows) : (*together)(xy, rows);
    const Tensor loss = sum(mul(outputs, full({4}, value, DType::kF32)));  // [4, 1] times [4]
    context.backward({loss});
    Hybrid& model = alone ? *alone : together->module();
    const ServerGradients there =
        agent.call<ServerGradients::get>("server", context.id(), model.net.module_rref(), model.table.module_rref());
    return {outputs.to_vector<float>(),
            loss.item<float>(),
            context.gradient(model.first.weight).to_vector<float>(),
            context.gradient(model.last.weight).to_vector<float>(),
            there.net.to_vector<float>(),
            there.table.to_vector<float>()};
  }
};

// What a trainer has before anything is averaged.
Step expected_of(int trainer) {
  const auto negative = [](Step step) {
    for (auto* list : {&step.first, &step.last, &step.net, &step.table}) {
      for (float& x : *list) x = 0 - x;
    }
    return step;
  };
  if (trainer == 0)
    return {{-3.5, -3.5, 3.5, 3.5},
            0,
            {-32, -16, 0, -16},
            {-56, -28, -28},
            {-16, 16, 8, 8, 8, 0, -16, -4, -4, -4, 0, -16, -4, -4, -4},
            {0, 0, 0, 0, 0, 0}};
  if (trainer == 1)
    return {{0, 0, 7, 7},
            -56,
            {16, -16, 16, -16},
            {0, -28, -28},
            {0, 0, 0, 0, 0, -16, 0, -4, -4, -4, -16, 0, -4, -4, -4},
            {-8, -8, -8, -8, -8, -8}};
  // The others have the mirror image.
  Step step = negative(expected_of(3 - trainer));
  step.loss = -step.loss;
  std::swap(step.outputs[0], step.outputs[2]);
  std::swap(step.outputs[1], step.outputs[3]);
  return step;
}

std::ostream& operator<<(std::ostream& out, const std::vector<float>& list) {
  for (const float x : list) out << " " << x;
  return out;
}

// Three rounds in each of which all trainers make a step at the same time.
bool follow(rpc::Agent& agent, bool data_parallel) {
  bool is_right = true;
  for (int round = 0; round < 3; ++round) {
    std::vector<rpc::Future<Step>> steps;
    for (int trainer = 0; trainer < kTrainers; ++trainer) steps.push_back(agent.call_async<Trainer::step>(trainer));
    for (int trainer = 0; trainer < kTrainers; ++trainer) {
      const Step step = steps[static_cast<size_t>(trainer)].wait();
      Step expected = expected_of(trainer);
      // Averaged over mirror images; the server's are each context's own.
      if (data_parallel) expected.first.assign(4, 0), expected.last.assign(3, 0);
      is_right = is_right && step == expected;
      if (round > 0) continue;  // nobody changes a weight: all rounds are the same
      std::cout << "trainer " << trainer << (data_parallel ? ", data-parallel" : "") << ": outputs" << step.outputs
                << ", loss " << step.loss << "\n  gradients of first" << step.first << ", last" << step.last
                << "\n  of the server's net" << step.net << ", table" << step.table << "\n";
    }
  }
  return is_right;
}

int main() {
  comm::World world;
  world.init();
  const comm::Group& all = world.group();
  CHORALE_CHECK(all.size() == kTrainers + 2, "this takes six processes: chorale run -n 6 ./six_processes");
  Trainer::world = &all;
  rpc::AgentOptions options{.serves = rpc::module_functions<Table>()};
  rpc::add(options.serves, rpc::module_functions<ServerNet>());
  rpc::add(options.serves,
           {rpc::remote<Trainer::set_up>, rpc::remote<Trainer::step>, rpc::remote<ServerGradients::get>});
  options.name = all.rank() < kTrainers ? concat("trainer", all.rank()) : all.rank() == kTrainers ? "server" : "master";
  rpc::Agent agent(all, options);

  bool is_right = true;
  for (const bool data_parallel : {false, true}) {
    std::vector<rpc::Future<void>> ready;
    if (agent.info().name == "master") {
      const rpc::RemoteModule<Table> table(agent, "server");
      const rpc::RemoteModule<ServerNet> net(agent, "server");
      for (int trainer = 0; trainer < kTrainers; ++trainer)
        ready.push_back(agent.call_async<Trainer::set_up>(trainer, data_parallel, table, net));
    }
    if (data_parallel && all.rank() >= kTrainers) all.new_group({0, 1, 2, 3});
    rpc::wait_all(ready);
    if (agent.info().name == "master") is_right = follow(agent, data_parallel) && is_right;
    agent.barrier();
  }
  Trainer::alone.reset();
  Trainer::together.reset();
  agent.shutdown();
  return is_right ? 0 : 1;
}

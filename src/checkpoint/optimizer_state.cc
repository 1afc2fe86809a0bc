#include "checkpoint/optimizer_state.h"

#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>

#include <c10/util/Type.h>
#include <fsdp/error.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

namespace fsdp::checkpoint {
namespace {

namespace optim = torch::optim;

// Names the fields of each state class and options class, for `f(name, reference)`.

template <class State, class F>
void adam_state(State& s, F f) {
  f("step", s.step());
  f("exp_avg", s.exp_avg());
  f("exp_avg_sq", s.exp_avg_sq());
  f("max_exp_avg_sq", s.max_exp_avg_sq());
}

template <class Options, class F>
void adam_options(Options& o, F f) {
  f("lr", o.lr());
  f("betas", o.betas());
  f("eps", o.eps());
  f("weight_decay", o.weight_decay());
  f("amsgrad", o.amsgrad());
}

template <class F>
void each_field(optim::AdamWParamState& s, F f) {
  adam_state(s, f);
}
template <class F>
void each_field(optim::AdamWOptions& o, F f) {
  adam_options(o, f);
}
template <class F>
void each_field(optim::AdamParamState& s, F f) {
  adam_state(s, f);
}
template <class F>
void each_field(optim::AdamOptions& o, F f) {
  adam_options(o, f);
}

template <class F>
void each_field(optim::SGDParamState& s, F f) {
  f("momentum_buffer", s.momentum_buffer());
}
template <class F>
void each_field(optim::SGDOptions& o, F f) {
  f("lr", o.lr());
  f("momentum", o.momentum());
  f("dampening", o.dampening());
  f("weight_decay", o.weight_decay());
  f("nesterov", o.nesterov());
}

template <class F>
void each_field(optim::RMSpropParamState& s, F f) {
  f("step", s.step());
  f("square_avg", s.square_avg());
  f("momentum_buffer", s.momentum_buffer());
  f("grad_avg", s.grad_avg());
}
template <class F>
void each_field(optim::RMSpropOptions& o, F f) {
  f("lr", o.lr());
  f("alpha", o.alpha());
  f("eps", o.eps());
  f("weight_decay", o.weight_decay());
  f("momentum", o.momentum());
  f("centered", o.centered());
}

template <class F>
void each_field(optim::AdagradParamState& s, F f) {
  f("step", s.step());
  f("sum", s.sum());
}
template <class F>
void each_field(optim::AdagradOptions& o, F f) {
  f("lr", o.lr());
  f("lr_decay", o.lr_decay());
  f("weight_decay", o.weight_decay());
  f("initial_accumulator_value", o.initial_accumulator_value());
  f("eps", o.eps());
}

OptionValue to_value(bool v) { return v; }
OptionValue to_value(double v) { return v; }
OptionValue to_value(const std::tuple<double, double>& v) { return std::make_pair(std::get<0>(v), std::get<1>(v)); }

bool assign(const OptionValue& from, bool& to) {
  const auto* value = std::get_if<bool>(&from);
  return value ? (to = *value, true) : false;
}
bool assign(const OptionValue& from, double& to) {
  const auto* value = std::get_if<double>(&from);
  return value ? (to = *value, true) : false;
}
bool assign(const OptionValue& from, std::tuple<double, double>& to) {
  const auto* value = std::get_if<std::pair<double, double>>(&from);
  return value ? (to = {value->first, value->second}, true) : false;
}

template <class Optimizer, class State, class Options>
class Fields final : public OptimizerFields {
 public:
  explicit Fields(const char* type) : type_(type) {}

  const char* type() const override { return type_; }
  bool fits(const optim::Optimizer& optimizer) const override {
    return dynamic_cast<const Optimizer*>(&optimizer) != nullptr;
  }
  std::unique_ptr<optim::OptimizerParamState> make_state() const override { return std::make_unique<State>(); }

  void visit(optim::OptimizerParamState& state, const TensorFn& tensor, const CounterFn& counter) const override {
    each_field(static_cast<State&>(state), [&](const char* field, auto& value) {
      if constexpr (std::is_same_v<std::decay_t<decltype(value)>, at::Tensor>) {
        tensor(field, value);
      } else {
        counter(field, value);
      }
    });
  }

  std::map<std::string, OptionValue> options(const optim::OptimizerOptions& options) const override {
    std::map<std::string, OptionValue> values;
    Options copy = static_cast<const Options&>(options);
    each_field(copy, [&](const char* name, auto& value) { values.emplace(name, to_value(value)); });
    return values;
  }

  void set_options(optim::OptimizerOptions& options, const std::map<std::string, OptionValue>& values) const override {
    size_t used = 0;
    each_field(static_cast<Options&>(options), [&](const char* name, auto& value) {
      const auto it = values.find(name);
      if (it == values.end() || !assign(it->second, value)) {
        throw CheckpointError("the checkpoint has no usable option '" + std::string(name) + "' for " + type_);
      }
      ++used;
    });
    if (used != values.size()) {
      throw CheckpointError("the checkpoint has " + std::to_string(values.size()) + " options for " + type_ +
                            ", expected " + std::to_string(used));
    }
  }

 private:
  const char* type_;
};

}  // namespace

const OptimizerFields& OptimizerFields::of(const optim::Optimizer& optimizer) {
  static const Fields<optim::AdamW, optim::AdamWParamState, optim::AdamWOptions> adamw("AdamW");
  static const Fields<optim::Adam, optim::AdamParamState, optim::AdamOptions> adam("Adam");
  static const Fields<optim::SGD, optim::SGDParamState, optim::SGDOptions> sgd("SGD");
  static const Fields<optim::RMSprop, optim::RMSpropParamState, optim::RMSpropOptions> rmsprop("RMSprop");
  static const Fields<optim::Adagrad, optim::AdagradParamState, optim::AdagradOptions> adagrad("Adagrad");
  for (const OptimizerFields* fields :
       {static_cast<const OptimizerFields*>(&adamw), static_cast<const OptimizerFields*>(&adam),
        static_cast<const OptimizerFields*>(&sgd), static_cast<const OptimizerFields*>(&rmsprop),
        static_cast<const OptimizerFields*>(&adagrad)}) {
    if (fields->fits(optimizer)) {
      return *fields;
    }
  }
  throw NotSupported("checkpoints of the optimizer " + c10::demangle(typeid(optimizer).name()) +
                     " are not supported; AdamW, Adam, SGD, RMSprop and Adagrad of torch::optim are");
}

}  // namespace fsdp::checkpoint

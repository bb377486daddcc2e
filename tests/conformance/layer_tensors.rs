//! The list of a layer's tensors: a caller that knows nothing else brings all that calls need and
//! asks for all that they have, and no call takes or returns anything that is not in the list.

use super::layers::engine;
use super::mesh::{mesh, on_ranks, sharded};
use super::trained::RNG_KEY;
use moesaic::spec::canonical_tensors;
use moesaic::{
    Buffer, DType, Engine, EngineError, Input, InputReason, Layer, LayerCall, LayerOptions,
    LayerSpec, LayerTensor, LayerTensorRole, Output, Parallel, Ptr, RawBackward, RawCall, Saved,
    Strategy, Tensor, TensorDim, TensorKind, Tensors, Training, WeightReason, layer_tensors,
};
use std::collections::{BTreeMap, BTreeSet};

const TOKENS: usize = 5;

/// The layers, each with an option that adds tensors or changes their types.
const SPECS: [&str; 13] = [
    "",
    "router = { kind = 'table', table_rows = 3, token_mask = true }",
    "router = { kind = 'external' }",
    "router = { kind = 'external' }
     capacity = { mode = 'factor', factor = 0.5, renormalize_after_drop = true }",
    "router = { bias = true, select_bias = true, score = 'sigmoid' }
     experts = { bias = 'all' }
     shared = [{ hidden_dim = 16, gate = 'sigmoid' }, { hidden_dim = 8 }]",
    "shared = [{ hidden_dim = 16, gate = 'residual' }]",
    "latent = { dim = 12, norm_eps = 0.05, bias = true }",
    "precision = { weights = 'bf16', activations = 'bf16', expert_gradients = 'bf16' }",
    "router = { token_mask = true, active_k = true }",
    "capacity = { mode = 'bounded', factor = 1.0 }",
    "losses = [{ kind = 'switch', coefficient = 0.1 },
               { kind = 'sequence', coefficient = 0.1 },
               { kind = 'global', coefficient = 0.1 }]",
    "router = { noise = 1.0, noise_kind = 'learned' }",
    "router = { kind = 'cosine', projection_dim = 6 }",
];

/// The same with codes for experts, and with rounded rows, which nothing can train.
const CODES: [(&str, bool); 2] = [
    ("precision = { experts = 'mxfp4' }", true),
    (
        "precision = { experts = 'mxfp4', expert_activations = 'int8' }",
        false,
    ),
];

fn spec(options: &str) -> LayerSpec {
    let shape = "shape = { model_dim = 32, hidden_dim = 64, experts = 4, top_k = 2 }";
    let toml = format!("{shape}\n{options}");
    LayerSpec::from_toml(&toml).unwrap_or_else(|e| panic!("{}", e.render("spec", false)))
}

/// A valid value of a tensor: ids of as many experts as slots, and ones.
fn filled(tensor: &LayerTensor, tokens: usize) -> Tensor<'static> {
    let shape = tensor.shape(tokens);
    let (count, k) = (shape.iter().product(), shape.last().copied().unwrap_or(1));
    let of = |at: usize| match &*tensor.name {
        "topk_ids" => at % k,
        "sequence_ids" | "token_ids" | "router.table" => 0,
        "global_tokens" => 99,
        _ => 1,
    };
    let values = (0..count).map(of);
    match tensor.dtype {
        DType::I32 => Tensor::owned(&shape, values.map(|v| v as i32).collect()),
        DType::I64 => Tensor::owned(&shape, values.map(|v| v as i64).collect()),
        float => {
            let wave = |at: usize| (at as f32 * 0.7 + tensor.name.len() as f32).sin();
            let values: Vec<f32> = (0..count).map(wave).collect();
            Tensor::rounded(float, &shape, &values).into_static()
        }
    }
}

/// The tensors of a layer, and a caller that knows nothing else.
struct Caller<'l> {
    layer: &'l Layer,
    what: String,
}

impl Caller<'_> {
    fn of(&self, call: LayerCall, role: LayerTensorRole) -> Vec<&LayerTensor> {
        let tensors = self.layer.tensors().iter();
        tensors
            .filter(|tensor| tensor.role == role && tensor.is_of(call))
            .collect()
    }

    fn names(&self, call: LayerCall, role: LayerTensorRole) -> Vec<&str> {
        let tensors = self.of(call, role).into_iter();
        tensors.map(|tensor| &*tensor.name).collect()
    }

    fn has_role(&self, name: &str, role: LayerTensorRole) -> bool {
        let tensor = self.layer.tensor(name);
        tensor.is_some_and(|tensor| tensor.role == role)
    }

    fn input(&self, call: LayerCall) -> Input<'static> {
        let mut input = Input {
            tokens: TOKENS,
            ..Input::default()
        };
        for tensor in self.of(call, LayerTensorRole::Input) {
            input.insert(&tensor.name, filled(tensor, TOKENS));
        }
        input
    }

    fn run(
        &self,
        call: LayerCall,
        input: &Input<'_>,
        names: &[&str],
    ) -> Result<(Output, Option<Saved>), EngineError> {
        let (layer, input) = (self.layer, input.reading(names));
        Ok(match call {
            LayerCall::Forward => (layer.forward(input)?, None),
            LayerCall::Route => (layer.route(input)?, None),
            LayerCall::RouteTrain => (layer.route(input.in_training(RNG_KEY))?, None),
            LayerCall::ForwardTrain => {
                let (output, saved) = layer.forward_train(input, RNG_KEY)?;
                (output, Some(saved))
            }
            LayerCall::Backward => unreachable!("it has no input"),
        })
    }

    /// Holds the tensors of results against the list.
    fn check_results(&self, found: &Tensors<'_>, wanted: &[&LayerTensor]) {
        let names: BTreeSet<&str> = found.keys().map(String::as_str).collect();
        let listed: BTreeSet<&str> = wanted.iter().map(|tensor| &*tensor.name).collect();
        assert_eq!(names, listed, "{}", self.what);
        for tensor in wanted {
            let found = &found[tensor.name.as_str()];
            let (dtype, shape) = (found.dtype, &*found.shape);
            let checked = tensor.check(TensorKind { dtype, shape }, TOKENS);
            assert_eq!(checked, Ok(()), "{}: {tensor}", self.what);
            assert_eq!(tensor.bytes(TOKENS), found.data.len(), "{}", self.what);
        }
    }

    /// Holds a forward call against the list.
    fn check_call(&self, call: LayerCall) -> Option<Saved> {
        let what = format!("{call:?} of {}", self.what);
        let input = self.input(call);
        let outputs = self.names(call, LayerTensorRole::Output);
        let ran = self.run(call, &input, &outputs);
        let (output, saved) = ran.unwrap_or_else(|e| panic!("{what}: {e}"));
        let results = output.into_tensors();
        self.check_results(&results, &self.of(call, LayerTensorRole::Output));

        for tensor in self.of(call, LayerTensorRole::Input) {
            let mut without = input.clone();
            without.tensors.remove(&tensor.name);
            let error = self.run(call, &without, &outputs).err();
            let Some(EngineError::Input { name, reason }) = error else {
                panic!("{what} runs without {tensor}");
            };
            let (dtype, shape) = (tensor.dtype, tensor.shape(TOKENS));
            let missing = InputReason::Missing { dtype, shape };
            assert_eq!((name, reason), (tensor.name.clone(), missing), "{what}");

            let other = filled(tensor, TOKENS + 1);
            let mut wider = input.clone();
            if tensor.depends_on_tokens() {
                let found = TensorKind {
                    dtype: other.dtype,
                    shape: &other.shape,
                };
                let differs = tensor.check(found, TOKENS).unwrap_err();
                wider.insert(&tensor.name, other);
                let error = self.run(call, &wider, &outputs).err();
                let Some(EngineError::Input { reason, .. }) = error else {
                    panic!("{what} takes another {tensor}");
                };
                assert_eq!(reason, InputReason::Tensor(differs), "{what}");
            }
            if let Some(range) = tensor.indices() {
                let error = tensor.check_indices(&[range.most, range.most + 1]);
                assert_eq!(error.unwrap_err().at, 1, "{what}");
                let count = tensor.shape(TOKENS).iter().product();
                let ids = vec![range.most + 1; count];
                let mut outside = input.clone();
                outside.insert(&tensor.name, Tensor::owned(&tensor.shape(TOKENS), ids));
                let error = self.run(call, &outside, &outputs).err();
                let Some(EngineError::Input { reason, .. }) = error else {
                    panic!("{what} takes any number in {tensor}");
                };
                assert!(
                    matches!(reason, InputReason::Range { .. }),
                    "{what}: {reason}"
                );
            }
        }

        // Names that the list has not for the call, scratch among them. An input may be read back.
        let plan = self.layer.plan().tensors.iter().map(|tensor| &*tensor.name);
        let listed = self.layer.tensors().iter().map(|tensor| &*tensor.name);
        for name in plan.chain(listed).chain(["nothing"]) {
            if outputs.contains(&name) || self.has_role(name, LayerTensorRole::Input) {
                continue;
            }
            let error = self.run(call, &input, &[name]).err();
            let refused = matches!(
                error,
                Some(EngineError::NoOutput { .. } | EngineError::TrainingOutput { .. })
            );
            assert!(
                refused,
                "{what} has `{name}`, which is not listed: {error:?}"
            );
        }
        saved
    }

    /// Holds a backward call against the list, and the gradients that it leaves.
    fn check_back(&self, saved: &Saved) {
        let [dy] = &*self.of(LayerCall::Backward, LayerTensorRole::OutputGradient) else {
            panic!("{}: one gradient of the output", self.what);
        };
        let back = self.layer.backward(saved, &filled(dy, TOKENS), false);
        let back = back.unwrap_or_else(|e| panic!("{}: {e}", self.what));
        let wanted = self.of(LayerCall::Backward, LayerTensorRole::InputGradient);
        self.check_results(&back.into_tensors(), &wanted);
        let refused = self.layer.backward(saved, &filled(dy, TOKENS + 1), false);
        assert!(refused.is_err(), "{}", self.what);

        let mut gradients = Tensors::new();
        for weight in canonical_tensors(self.layer.spec()) {
            if let Ok(gradient) = self.layer.gradient(&weight.name) {
                gradients.insert(format!("grad.{}", weight.name), gradient);
            }
        }
        let wanted = self.of(LayerCall::Backward, LayerTensorRole::WeightGradient);
        self.check_results(&gradients, &wanted);
        for tensor in wanted {
            let weight = tensor.weight().and_then(|name| self.layer.tensor(name));
            let weight = weight.expect("it has a weight");
            assert_eq!(weight.dims, tensor.dims, "{}: {tensor}", self.what);
        }
    }

    /// Holds every call of the layer against the list.
    fn check(&self, trains: bool) {
        self.check_call(LayerCall::Forward);
        self.check_call(LayerCall::Route);
        let of_training = [
            LayerCall::ForwardTrain,
            LayerCall::RouteTrain,
            LayerCall::Backward,
        ];
        if trains {
            self.check_call(LayerCall::RouteTrain);
            let saved = self.check_call(LayerCall::ForwardTrain);
            self.check_back(&saved.expect("it trains"));
        } else {
            let mut tensors = self.layer.tensors().iter();
            let is_of = |tensor: &LayerTensor| {
                let mut calls = of_training.iter();
                tensor.role != LayerTensorRole::Weight && calls.any(|call| tensor.is_of(*call))
            };
            assert!(!tensors.any(is_of), "{}", self.what);
        }
    }
}

/// The weights that a list names.
fn weights(tensors: &[LayerTensor]) -> Tensors<'static> {
    let weights = tensors
        .iter()
        .filter(|tensor| tensor.role == LayerTensorRole::Weight);
    let filled = weights.map(|tensor| (tensor.name.clone(), filled(tensor, 0)));
    filled.collect()
}

fn check_weights(engine: &Engine, spec: &LayerSpec, training: Option<Training>, layer: &Layer) {
    let options = LayerOptions::default().training(training);
    let empty = engine.layer_with(spec, &Tensors::new(), options);
    let Err(EngineError::Weights(missing)) = empty else {
        panic!("a layer without weights");
    };
    let mut asked = BTreeMap::new();
    for error in missing {
        let EngineError::Weight { name, reason } = error else {
            panic!("{error}");
        };
        let WeightReason::Missing { dtype, shape } = reason else {
            panic!("{reason}");
        };
        asked.insert(name, (dtype, shape));
    }
    let listed = layer.tensors().iter();
    let listed = listed.filter(|tensor| tensor.role == LayerTensorRole::Weight);
    let listed = listed.map(|tensor| (tensor.name.clone(), (tensor.dtype, tensor.shape(0))));
    assert_eq!(asked, listed.collect(), "{}", spec.to_toml());
    for (name, tensor) in weights(layer.tensors()) {
        layer.set_weight(&name, &tensor).unwrap();
        let shape = [&[1], &*tensor.shape].concat();
        let wider = Tensor { shape, ..tensor };
        assert!(layer.set_weight(&name, &wider).is_err(), "{name}");
    }
}

fn check_one(engine: &Engine, spec: &LayerSpec, training: Option<Training>) {
    let listed = layer_tensors(spec, engine.target(), training).unwrap();
    let given = weights(&listed);
    let options = LayerOptions::default().training(training);
    let layer = engine.layer_with(spec, &given, options).unwrap();
    assert_eq!(layer.tensors(), listed, "{}", spec.to_toml());
    assert_eq!(layer.handle().tensors(), listed, "{}", spec.to_toml());
    check_weights(engine, spec, training, &layer);
    let what = format!("training {}, {}", training.is_some(), spec.to_toml());
    let caller = Caller {
        layer: &layer,
        what,
    };
    caller.check(training.is_some());
    caller.check_raw(engine, training.is_some());
    check_sizes(&layer);
}

/// Holds sizes against those of the plan, for many numbers of tokens.
fn check_sizes(layer: &Layer) {
    for tensor in layer.tensors() {
        let planned = layer.plan().tensor(&tensor.name).unwrap();
        for tokens in [0usize, 1, 2, 63, 64, 65, 1000, 1 << 20] {
            let sizes = planned.shape.iter().map(|size| size.eval(tokens as u64));
            let sizes: Vec<usize> = sizes.map(|size| size as usize).collect();
            assert_eq!(tensor.shape(tokens), sizes, "{tensor} for {tokens}");
            assert_eq!(tensor.bytes(tokens) as u64, planned.bytes(tokens as u64));
        }
        let depends = planned.elements(7) != planned.elements(8);
        assert_eq!(tensor.depends_on_tokens(), depends, "{tensor}");
    }
}

#[test]
fn one_process_takes_and_returns_what_is_listed() {
    let engine = engine();
    for options in SPECS {
        let spec = spec(options);
        check_one(&engine, &spec, None);
        check_one(&engine, &spec, Some(Training::default()));
    }
}

#[test]
fn codes_of_experts_are_listed() {
    let engine = engine();
    for (options, trains) in CODES {
        let spec = spec(options);
        check_one(&engine, &spec, None);
        let training = Some(Training::default());
        if trains {
            check_one(&engine, &spec, training);
        } else {
            let error = layer_tensors(&spec, engine.target(), training).unwrap_err();
            assert!(matches!(error, EngineError::Plan(_)), "{error}");
        }
        // A GPU multiplies the numbers that codes stand for, and rounds no rows.
        let gpu = layer_tensors(&spec, "cuda:sm_90a".parse().unwrap(), None);
        if trains {
            let gpu = gpu.unwrap();
            let named = |tensor: &&LayerTensor| tensor.name == "experts.down.weight";
            let down = gpu.iter().find(named).unwrap();
            assert!(
                down.dtype.is_float() && down.shape(0) == [4, 32, 64],
                "{down}"
            );
        } else {
            assert!(matches!(gpu, Err(EngineError::Plan(_))));
        }
    }
}

#[test]
fn an_invalid_spec_has_no_list() {
    let mut spec = spec("");
    spec.shape.top_k = 99;
    let error = layer_tensors(&spec, engine().target(), None).unwrap_err();
    assert!(matches!(error, EngineError::Spec(_)), "{error}");
}

#[test]
fn tensors_are_printed_with_formulas() {
    let tensors = layer_tensors(&spec(""), engine().target(), None).unwrap();
    let line = |name: &str| {
        let found = tensors.iter().find(|tensor| tensor.name == name);
        found.unwrap().to_string()
    };
    assert_eq!(line("x"), "x [T, 32] f32");
    assert_eq!(line("row_slots"), "row_slots [T*2] i32");
    assert_eq!(line("counts"), "counts [4] i64");
    let huge = TensorDim::PerToken(2).size(usize::MAX);
    assert_eq!(huge, usize::MAX, "sizes saturate");
}

/// Memory of a caller, by name.
struct Memory(BTreeMap<String, (Buffer, usize)>);

impl Memory {
    fn of(engine: &Engine, tensors: Vec<(&LayerTensor, Vec<u8>)>) -> Memory {
        let each = tensors.into_iter().map(|(tensor, bytes)| {
            let buffer = engine.device().alloc(bytes.len().max(64)).unwrap();
            engine.device().upload(&bytes, &buffer, 0).unwrap();
            (tensor.name.clone(), (buffer, bytes.len()))
        });
        Memory(each.collect())
    }

    fn addresses(&self) -> Vec<(&str, Ptr)> {
        let each = self.0.iter();
        each.map(|(name, (buffer, _))| (name.as_str(), buffer.ptr()))
            .collect()
    }

    fn bytes(&self, engine: &Engine, name: &str) -> Vec<u8> {
        let (buffer, bytes) = &self.0[name];
        let mut read = vec![0; *bytes];
        engine.device().download(buffer, 0, &mut read).unwrap();
        read
    }

    fn spoil(&self, engine: &Engine, name: &str) {
        let (buffer, bytes) = &self.0[name];
        let spoilt = vec![0x7f; *bytes];
        engine.device().upload(&spoilt, buffer, 0).unwrap();
    }
}

/// Calls on memory that the caller allocates by the list.
impl Caller<'_> {
    fn memory(&self, engine: &Engine, call: LayerCall) -> Memory {
        let input = |tensor: &LayerTensor| filled(tensor, TOKENS).data.to_vec();
        let inputs = self.of(call, LayerTensorRole::Input).into_iter();
        let inputs = inputs.map(|tensor| (tensor, input(tensor)));
        let outputs = self.of(call, LayerTensorRole::Output).into_iter();
        let outputs = outputs.map(|tensor| (tensor, vec![0x7f; tensor.bytes(TOKENS)]));
        Memory::of(engine, inputs.chain(outputs).collect())
    }

    fn check_raw(&self, engine: &Engine, trains: bool) {
        let calls = [LayerCall::Forward, LayerCall::ForwardTrain];
        for call in &calls[..1 + usize::from(trains)] {
            let outputs = self.names(*call, LayerTensorRole::Output);
            let ran = self.run(*call, &self.input(*call), &outputs);
            let (wanted, by_host) = ran.unwrap();
            let memory = self.memory(engine, *call);
            let tensors = memory.addresses();
            // SAFETY: the list says how large the tensors are, ids are in range, and memory lives
            // until the end of this turn.
            let raw = unsafe { RawCall::new(TOKENS, &tensors) };
            let saved = match call {
                LayerCall::Forward => self.layer.forward(raw).map(|_| None).unwrap(),
                _ => Some(self.layer.forward_train(raw, RNG_KEY).unwrap().1),
            };
            // Nothing is written behind the last row of `row_slots`, which masks and drops leave.
            for name in outputs.iter().filter(|name| **name != "row_slots") {
                let wanted = wanted.get(name).unwrap().data.to_vec();
                assert_eq!(
                    memory.bytes(engine, name),
                    wanted,
                    "{name} of {}",
                    self.what
                );
            }
            if let (Some(saved), Some(by_host)) = (saved, by_host) {
                self.check_raw_back(engine, &memory, [&saved, &by_host]);
            }
            self.check_addresses(*call, &memory);
        }
    }

    /// Refuses a call that does not name an input.
    fn check_addresses(&self, call: LayerCall, memory: &Memory) {
        for missing in self.names(call, LayerTensorRole::Input) {
            let mut tensors = memory.addresses();
            tensors.retain(|(name, _)| *name != missing);
            // SAFETY: as in `check_raw`; the call is refused.
            let raw = unsafe { RawCall::new(TOKENS, &tensors) };
            let error = match call {
                LayerCall::Forward => self.layer.forward(raw).err(),
                _ => self.layer.forward_train(raw, RNG_KEY).err(),
            };
            let Some(EngineError::Input { name, reason }) = error else {
                panic!("{call:?} of {} runs without `{missing}`", self.what);
            };
            assert_eq!((&*name, reason), (missing, InputReason::NoAddress));
        }
    }

    /// Spoils what backward does not read, and holds its results against those of a call whose
    /// tensors are the layer's.
    fn check_raw_back(&self, engine: &Engine, memory: &Memory, [saved, by_host]: [&Saved; 2]) {
        let names = memory.0.keys();
        let mut unread = names.filter(|name| {
            let tensor = self.layer.tensor(name).expect("it is listed");
            !tensor.is_of(LayerCall::Backward)
        });
        assert!(unread.clone().any(|name| name == "y"), "{}", self.what);
        unread.by_ref().for_each(|name| memory.spoil(engine, name));

        let [dy] = &*self.of(LayerCall::Backward, LayerTensorRole::OutputGradient) else {
            panic!("{}: one gradient of the output", self.what);
        };
        let dy_values = filled(dy, TOKENS);
        let wanted = self.layer.backward(by_host, &dy_values, false).unwrap();
        let weights = self.layer.gradients().unwrap();
        let roles = [
            LayerTensorRole::InputGradient,
            LayerTensorRole::WeightGradient,
        ];
        let results = roles
            .map(|role| self.of(LayerCall::Backward, role))
            .concat();
        let given = results
            .iter()
            .map(|tensor| (*tensor, vec![0x7f; tensor.bytes(TOKENS)]));
        let given = given.chain([(*dy, dy_values.data.to_vec())]);
        let back = Memory::of(engine, given.collect());
        let tensors = back.addresses();
        // SAFETY: as in `check_raw`.
        let call = unsafe { RawBackward::new(&tensors) };
        self.layer.backward(saved, call, false).unwrap();
        for tensor in results {
            let found = back.bytes(engine, &tensor.name);
            let wanted = match tensor.weight() {
                Some(weight) => &weights[weight],
                None => wanted.get(&tensor.name).unwrap(),
            };
            assert!(found == *wanted.data, "{tensor} of {}", self.what);
        }
    }
}

/// The list of a rank, whose weights are its part.
fn check_rank(engine: &Engine, mesh: &moesaic::Mesh, spec: &LayerSpec, strategy: Strategy) {
    let whole = weights(&layer_tensors(spec, engine.target(), Training::default()).unwrap());
    for training in [None, Some(Training::default())] {
        let options = LayerOptions::over(mesh).training(training);
        let layer = engine.layer_with(spec, &whole, options).unwrap();
        let set = layer.set_strategy(strategy);
        set.unwrap_or_else(|e| panic!("{strategy}: {e}"));
        let what = format!("{strategy} of {:?}, {}", mesh.parallel(), spec.to_toml());
        let own = layer_tensors(spec, engine.target(), training).unwrap();
        let mut listed: Vec<&LayerTensor> = layer.tensors().iter().collect();
        listed.retain(|tensor| tensor.role == LayerTensorRole::Weight);
        let names = |tensors: &[&LayerTensor]| -> Vec<String> {
            tensors.iter().map(|tensor| tensor.name.clone()).collect()
        };
        let mut of_one: Vec<&LayerTensor> = own.iter().collect();
        of_one.retain(|tensor| tensor.role == LayerTensorRole::Weight);
        assert_eq!(names(&listed), names(&of_one), "{what}");
        for (part, one) in listed.iter().zip(of_one) {
            let shape = mesh.part_shape(&one.name, &one.shape(0)).unwrap();
            assert_eq!(part.shape(0), shape, "{what}: {part}");
            let held = mesh.part(&whole, &part.name).unwrap();
            layer.set_weight(&part.name, &held).unwrap();
        }
        let caller = Caller {
            layer: &layer,
            what,
        };
        caller.check(training.is_some());
    }
}

#[test]
fn ranks_take_and_return_what_is_listed() {
    let engine = engine();
    let default = Strategy::default();
    let shadows = Strategy {
        shadows: 1,
        ..default
    };
    let cases: [(&str, Parallel, Strategy); 6] = [
        (SPECS[1], mesh(2, 1, 1), default),
        (SPECS[3], mesh(2, 1, 1), default),
        (SPECS[4], mesh(2, 2, 1), default),
        (SPECS[4], sharded(1, 2, 1), default),
        (SPECS[10], mesh(2, 1, 1), default),
        (SPECS[6], mesh(2, 1, 1), shadows),
    ];
    for (options, parallel, strategy) in cases {
        let spec = spec(options);
        on_ranks(&engine, parallel, |mesh| {
            check_rank(&engine, &mesh.for_any_r(), &spec, strategy);
        });
    }
}

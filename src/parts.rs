//! The modules that other crates of the workspace define, each with an example.

/// Collective operations between ranks, and the transports that carry their messages: threads,
/// MPI, NCCL and RCCL.
///
/// Layers call [`Collectives`](collectives::Collectives): all-to-all, all-gather, reduce-scatter,
/// all-reduce, broadcast, point-to-point messages, split, barrier. A call starts an operation and
/// returns without waiting. Every operation has a number and a deadline, and ends on every rank,
/// with a result or with an error. Results are the same bytes in every run, because sums are taken
/// in rank order.
///
/// ```
/// use moesaic::Engine;
/// use moesaic::collectives::{Call, Collectives, CommElement, Reduction, Slice, threads};
/// use std::sync::Arc;
///
/// # fn main() -> Result<(), moesaic::Error> {
/// let engine = Engine::cpu()?;
/// // Three ranks that are threads; under `mpirun` the world comes from `collectives::mpi`.
/// let results = threads::run(3, |_| Ok(engine.device().clone()), |mut world| {
///     let device = Arc::clone(world.device());
///     let buffer = Arc::new(device.alloc(4)?);
///     device.upload(&[world.rank() as u8 + 1; 4], &buffer, 0)?;
///     let data = Slice::whole(&buffer, CommElement::U8);
///     let call = Call::new("load of experts");
///     world.all_reduce(&data, &data, Reduction::Sum, &call)?.wait()?;
///     let mut sums = [0; 4];
///     device.download(&buffer, 0, &mut sums)?;
///     world.finish(&Call::new("end"))?;
///     Ok::<_, moesaic::Error>(sums)
/// })?;
/// for result in results {
///     assert_eq!(result.unwrap()?, [6; 4]);
/// }
/// # Ok(())
/// # }
/// ```
pub mod collectives {
    #[doc(inline)]
    pub use moesaic_collectives::*;
}

/// The whole layer in f64, as plain loops written for reading: expected values for your tests.
///
/// Values are f64, so round weights and tokens to the storage type first
/// ([`round_to`](reference::round_to), [`Weights::rounded`](reference::Weights::rounded)). A missing
/// or misshapen tensor panics with its name.
///
/// ```
/// use moesaic::LayerSpec;
/// use moesaic::reference::Weights;
///
/// let text = "shape = { model_dim = 8, hidden_dim = 16, experts = 4, top_k = 2 }";
/// let spec = LayerSpec::from_toml(text).unwrap();
/// let weights = Weights::random(&spec, 7);
/// assert_eq!(weights.get("router.weight").shape, [4, 8]);
/// ```
#[cfg(feature = "reference")]
pub mod reference {
    #[doc(inline)]
    pub use moesaic_reference::*;
}

/// The spec of a layer: its keys, defaults, and readers of model configs.
///
/// ```
/// use moesaic::spec::{LayerSpec, canonical_tensors};
///
/// # fn main() -> Result<(), moesaic::Error> {
/// let text = "shape = { model_dim = 64, hidden_dim = 128, experts = 8, top_k = 2 }";
/// let spec = LayerSpec::from_toml(text)?;
/// let weights = canonical_tensors(&spec);
/// assert_eq!(weights[0].name, "router.weight");
/// # Ok(())
/// # }
/// ```
pub mod spec {
    #[doc(inline)]
    pub use moesaic_spec::*;
}

/// Training around a layer: optimizers over named tensors, their state as a checkpoint, steps over
/// many ranks, gates that look at ranks, and checkpoints whose number of experts changes.
///
/// ```
/// use moesaic::train::{AdamW, Optimizer};
/// use moesaic::{Tensor, Tensors};
///
/// # fn main() -> Result<(), moesaic::Error> {
/// let mut weights = Tensors::from([("w", Tensor::owned(&[2], vec![1.0f32, -1.0]))]);
/// let gradients = Tensors::new().with("w", &[2], &[0.5f32, 0.0]);
/// let mut adam = AdamW { learning_rate: 0.1, ..AdamW::default() };
/// adam.step(&mut weights, &gradients)?;
/// assert!(weights["w"].to_f32()[0] < 1.0);
/// # Ok(())
/// # }
/// ```
#[cfg(feature = "train")]
pub mod train {
    #[doc(inline)]
    pub use moesaic_train::*;
}

/// Choosing the strategy of ranks, from measurements of your own training or serving steps.
///
/// A strategy changes no result and moves no weight, so a layer can try several in its own steps
/// and keep the fastest. [`Tuner`](tune::Tuner) decides from plain data, so ranks that pass the same
/// numbers decide alike. [`LayerTuner`](tune::LayerTuner) measures, and gives every rank the
/// largest time of all ranks. [`Planned`](tune::Planned) predicts with the planner.
///
/// ```
/// use moesaic::Parallel;
/// use moesaic::tune::{CallKind, TunerKey, TunerOptions, RowBucket, StrategySpace, Times, Tuner};
///
/// let mesh = Parallel { ep: 16, ..Parallel::default() };
/// let mut tuner = Tuner::new(TunerOptions::default(), StrategySpace::of(mesh, 8));
/// let key = TunerKey {
///     machine: "our rack".to_string(),
///     layer: "mixtral".to_string(),
///     calls: CallKind::Training,
///     rows: RowBucket::of(1000, None),
/// };
/// // A layer does this in each step: nothing is predicted here, so Tutel's search says what next.
/// let strategy = tuner.choose(&key, Vec::new);
/// tuner.observe(&key, strategy, Times { forward: 0.002, backward: 0.004 });
/// assert_eq!(tuner.events().len(), 1);
/// ```
#[cfg(feature = "tune")]
pub mod tune {
    #[doc(inline)]
    pub use moesaic_tune::*;

    /// A model of a machine, on which [`Planned`] simulates strategies: its links, its processors,
    /// and how far predictions can be off.
    ///
    /// [`published`] has machines by name, and [`Machine::from_toml`] reads yours; docs/SCALE.md
    /// describes the file.
    ///
    /// ```
    /// use moesaic::tune::{Machine, Planned, published, published_names};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// assert!(published_names().any(|name| name == "h100-ib"));
    /// let machine: Machine = published("h100-ib")?;
    /// assert_eq!(machine.target.backend(), "cuda");
    /// let planned = Planned::of(machine); // then `planned.predict(&layer)`
    /// # assert_eq!(planned.comm_dtypes.len(), 1);
    /// # Ok(())
    /// # }
    /// ```
    #[doc(inline)]
    pub use moesaic_planner::Machine;
    #[doc(inline)]
    pub use moesaic_planner::{published, published_names};

    /// Measurements of your machine, which replace the figures of a [`Machine`].
    ///
    /// `moesaic bench --ranks` measures and writes the file:
    ///
    /// ```
    /// use moesaic::tune::{Calibration, Machine, published};
    ///
    /// /// Reads what was measured on machines of the kind `h100-ib`.
    /// fn ours(measured: &str) -> Result<Machine, Box<dyn std::error::Error>> {
    ///     Ok(Calibration::from_toml(measured)?.apply(published("h100-ib")?)?)
    /// }
    /// # let text = "machine = 'h100-ib'\ndate = '2026-11-30'\nsource = 'a test'\nranks = 8";
    /// # assert_eq!(ours(text).unwrap().name, "h100-ib");
    /// ```
    #[doc(inline)]
    pub use moesaic_planner::Calibration;

    /// The reason that the file of a machine or of measurements cannot be read.
    ///
    /// ```
    /// use moesaic::tune::{ReadError, published};
    ///
    /// let Err(error) = published("h100ib") else { panic!() };
    /// assert!(matches!(error, ReadError::Unknown { .. }));
    /// assert!(error.to_string().contains("did you mean `h100-ib`?"));
    /// ```
    #[doc(inline)]
    pub use moesaic_planner::ReadError;
    #[doc(inline)]
    pub use moesaic_planner::{PlannerError, RoutingError};
}

/// The building blocks of `layer!`: arrays as tensors, and typed device memory.
///
/// ```
/// use moesaic::typed::tensor;
///
/// # fn main() -> Result<(), moesaic::Error> {
/// let flat = vec![0.5f32; 8 * 64];
/// let weight: &[[f32; 64]; 8] = tensor(&flat)?;
/// assert_eq!(weight[7][63], 0.5);
/// # Ok(())
/// # }
/// ```
pub mod typed {
    #[doc(inline)]
    pub use moesaic_typed::*;

    /// A kernel of a layer on the engine's device, as
    /// [`Engine::kernels`](crate::Engine::kernels) returns it for a [`Launcher`].
    ///
    /// ```
    /// use moesaic::typed::{KernelArgs, KernelArgsError, Launcher, LoadedKernel};
    ///
    /// /// The launcher of one entry; `A` is the struct that `layer!` makes for its arguments, such as
    /// /// `tiny_kernels::gate_topk::GateLogits`.
    /// fn launcher<A: KernelArgs>(kernels: &[LoadedKernel]) -> Result<Launcher<A>, KernelArgsError> {
    ///     Launcher::new(kernels)
    /// }
    /// ```
    #[doc(inline)]
    pub use moesaic_engine::LoadedKernel;
}

/// Checkpoints in safetensors and GGUF, of this and other libraries, read one expert at a time, and
/// written.
///
/// [`Engine::layer_from_hf`](crate::Engine::layer_from_hf) makes a layer of a model's folder. The
/// same in steps, for another precision or for tensors that the config does not name:
///
/// ```
/// use moesaic::DType;
/// use moesaic::spec::hf;
/// use moesaic::weights::{Checkpoint, LayerReader, LoadOptions};
///
/// # use moesaic::example::{engine, write_model};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (engine, folder) = (engine(), tempfile::tempdir()?);
/// # write_model(folder.path())?;
/// # let folder = folder.path();
/// let config = std::fs::read_to_string(folder.join("config.json"))?;
/// let mut import = hf::import(&config, 1)?; // a spec, and where each weight is found
/// import.spec.precision.weights = DType::F32;
/// let checkpoint = Checkpoint::open(folder)?; // maps the files
/// let weights = LayerReader::of_import(&import, &checkpoint, LoadOptions::default())?;
/// let layer = engine.layer(&import.spec, &weights)?; // reads each tensor when it needs it
/// assert_eq!(layer.spec().shape.model_dim, 32);
/// # Ok(())
/// # }
/// ```
///
/// [`quantize`](weights::quantize) makes a quantized model of a full-precision one, and you write
/// tensors of your own as safetensors:
///
/// ```
/// use moesaic::weights::{Checkpoint, write_safetensors};
/// use moesaic::Tensors;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("layer.safetensors");
/// let router = vec![0.5f32; 8 * 64];
/// write_safetensors(&path, &Tensors::new().with("router.weight", &[8, 64], &router))?;
/// let found = Checkpoint::open(&path)?.read("router.weight")?; // mapped, not copied
/// assert_eq!(found.shape, [8, 64]);
/// # Ok(())
/// # }
/// ```
pub mod weights {
    #[doc(inline)]
    pub use moesaic_weights::*;

    #[doc(inline)]
    pub use moesaic_tensor::Described;
    /// A destination of tensors that are not all in memory at once. [`Writer`] is one, for
    /// safetensors, and [`Ranks::collect`](crate::mesh::Ranks::collect) writes to one.
    ///
    /// ```
    /// use moesaic::DType;
    /// use moesaic::weights::{Described, WeightSink, Writer};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    /// # let folder = tempfile::tempdir()?;
    /// # let path = folder.path().join("layer.safetensors");
    /// let mut writer = Writer::file(&path);
    /// let scale = Described { name: "scale".to_string(), dtype: DType::F32, shape: vec![2] };
    /// writer.begin(&[scale])?;
    /// writer.write(&1.0f32.to_le_bytes())?; // in pieces of any length
    /// writer.write(&2.0f32.to_le_bytes())?;
    /// writer.end()?; // only now the file takes its place
    /// # assert_eq!(moesaic::weights::Checkpoint::open(&path)?.read("scale")?.to_f32(), [1.0, 2.0]);
    /// # Ok(())
    /// # }
    /// ```
    #[doc(inline)]
    pub use moesaic_tensor::WeightSink;
}

//! Layers: describing, making and calling one.

/// A layer as you describe it. docs/SPEC.md lists every key.
///
/// ```
/// use moesaic::LayerSpec;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let spec = LayerSpec::from_toml(
///     "shape = { model_dim = 64, hidden_dim = 128, experts = 8, top_k = 2 }
///      router = { renormalize = \"sum\" }",
/// )?;
/// assert_eq!(spec.shape.experts, 8);
///
/// let wrong = LayerSpec::from_toml("shape = { model_dim = 64 }").unwrap_err();
/// assert!(wrong.to_string().contains("hidden_dim"));
/// # Ok(())
/// # }
/// ```
#[doc(inline)]
pub use moesaic_spec::LayerSpec;

/// Tensors by name: weights, results, gradients, or the state of an optimizer.
///
/// ```
/// use moesaic::{Tensor, Tensors};
///
/// let router = vec![0.5f32; 4 * 8]; // lent, not copied
/// let mut weights = Tensors::new().with("router.weight", &[4, 8], &router);
/// weights.insert("router.bias", Tensor::owned(&[4], vec![0.0f32; 4]));
/// assert_eq!(weights["router.weight"].shape, [4, 8]);
/// ```
#[doc(inline)]
pub use moesaic_tensor::Tensors;

/// A tensor in host memory: element type, shape and bytes.
///
/// ```
/// use moesaic::{DType, Tensor, half::bf16};
///
/// let tensor = Tensor::owned(&[2, 2], vec![bf16::from_f32(1.5); 4]);
/// assert_eq!((tensor.dtype, tensor.elements()), (DType::Bf16, 4));
/// assert_eq!(tensor.to_f32(), [1.5; 4]);
/// ```
#[doc(inline)]
pub use moesaic_tensor::Tensor;

/// The bytes of a tensor: owned, borrowed, or mapped from a file.
///
/// ```
/// use moesaic::{Bytes, DType, Tensor};
///
/// let bytes = Bytes::copied(&1.5f32.to_le_bytes());
/// let tensor = Tensor { dtype: DType::F32, shape: vec![1], data: bytes };
/// assert_eq!(tensor.to_f32(), [1.5]);
/// ```
#[doc(inline)]
pub use moesaic_tensor::Bytes;

/// A source of weights, which the layer reads one expert at a time.
///
/// ```
/// use moesaic::{Tensors, WeightSource};
///
/// let router = [0.5f32; 32];
/// let weights = Tensors::new().with("router.weight", &[4, 8], &router);
/// // An engine asks for rows; of a weight of experts a row is an expert.
/// assert_eq!(weights.rows("router.weight", 1..3)?.shape, [2, 8]);
/// # Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
/// ```
#[doc(inline)]
pub use moesaic_tensor::WeightSource;

/// The error of a [`WeightSource`] or a [`WeightSink`](crate::weights::WeightSink) of yours: any
/// error, boxed.
///
/// ```
/// use moesaic::{DType, SourceError, Tensor, WeightSource};
/// use std::ops::Range;
///
/// /// Weights that a function computes row by row, such as those of another file format.
/// struct Rows<F> {
///     shape: Vec<usize>,
///     row: F,
/// }
///
/// impl<F: Fn(usize) -> Result<Vec<f32>, std::io::Error>> WeightSource for Rows<F> {
///     fn describe(&self, name: &str) -> Option<(DType, Vec<usize>)> {
///         (name == "router.weight").then(|| (DType::F32, self.shape.clone()))
///     }
///     fn rows(&self, _name: &str, rows: Range<usize>) -> Result<Tensor<'_>, SourceError> {
///         let row = (self.row)(rows.start)?; // one is enough: a layer asks for the rest
///         Ok(Tensor::owned(&[1, row.len()], row))
///     }
/// }
/// # let source = Rows { shape: vec![4, 2], row: |at| Ok(vec![at as f32; 2]) };
/// # assert_eq!(source.rows("router.weight", 3..4).unwrap().to_f32(), [3.0, 3.0]);
/// ```
#[doc(inline)]
pub use moesaic_tensor::SourceError;

/// The element type of a tensor.
///
/// ```
/// use moesaic::DType;
///
/// assert_eq!((DType::Bf16.size(), DType::Bf16.name()), (2, "bf16"));
/// ```
#[doc(inline)]
pub use moesaic_kernel::DType;

/// The 16-bit floats of this crate's tensors.
///
/// ```
/// use moesaic::half::{bf16, f16};
///
/// assert_eq!(bf16::from_f32(1.0).to_f32(), f16::from_f32(1.0).to_f32());
/// ```
pub use half;

/// A layer on a device, ready to call.
///
/// ```
/// use moesaic::{Engine, Input};
///
/// # use moesaic::example::{engine, spec, wave, weights};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let layer = engine().layer(&spec(), &weights())?;
/// let x = wave(3 * 8); // three tokens of eight numbers
/// let y = layer.forward(&Input::new(3, &x))?.y().to_f32();
/// assert_eq!(y.len(), 3 * 8);
/// # Ok(())
/// # }
/// ```
///
/// A layer is `Send` and `Sync`. A call blocks its thread until `y` is there, so an async program
/// gives each task a [`Layer::handle`] and calls it where blocking is allowed: in
/// `tokio::task::spawn_blocking`, or on a thread of its own.
///
/// ```
/// use moesaic::Input;
/// use std::thread;
///
/// # use moesaic::example::{engine, spec, wave, weights};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let layer = engine().layer(&spec(), &weights())?;
/// let task = |x: Vec<f32>| {
///     let layer = layer.handle(); // the same weights, a workspace of its own
///     move || Ok::<_, moesaic::Error>(layer.forward(&Input::new(1, &x))?.y().to_f32())
/// };
/// let tasks = [thread::spawn(task(wave(8))), thread::spawn(task(vec![0.5; 8]))];
/// for task in tasks {
///     assert_eq!(task.join().expect("no panic")?.len(), 8);
/// }
/// # Ok(())
/// # }
/// ```
#[doc(inline)]
pub use moesaic_engine::Layer;

/// The input of a call: the tokens, and the further tensors that the spec asks for.
///
/// ```
/// use moesaic::{Input, Tensor};
///
/// let (x, mask) = (vec![0.5f32; 2 * 8], vec![1, 0]);
/// let mut input = Input::new(2, &x).with_capacity_factor(1.25);
/// input.insert("token_mask", Tensor::owned(&[2], mask)); // router.token_mask
/// assert_eq!(input.tokens, 2);
/// ```
#[doc(inline)]
pub use moesaic_engine::Input;

/// The arguments of a call: the rows of `x` as a slice, an [`Input`], or a [`RawCall`], with the
/// outputs to read back.
///
/// ```
/// use moesaic::Input;
///
/// # use moesaic::example::{engine, spec, wave, weights};
/// # fn main() -> Result<(), moesaic::Error> {
/// let layer = engine().layer(&spec(), &weights())?;
/// let (mut x, mut y) = (wave(8), vec![0.0f32; 8]); // one token of eight numbers
/// for _ in 0..10 {
///     layer.forward_into(&x, &mut y)?; // no allocation after the first
///     x.copy_from_slice(&y);
/// }
/// let input = Input::new(1, &x);
/// let output = layer.forward(input.reading(&["y", "topk_ids"]))?;
/// assert_eq!(output.get("topk_ids").unwrap().shape, [1, 2]);
/// # Ok(())
/// # }
/// ```
#[doc(inline)]
pub use moesaic_engine::CallInput;

/// The result of a call: the tensors that you asked for.
///
/// ```
/// use moesaic::Input;
///
/// # use moesaic::example::{engine, spec, wave, weights};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let layer = engine().layer(&spec(), &weights())?;
/// let output = layer.forward(Input::new(3, &wave(24)).reading(&["y", "topk_ids"]))?;
/// let ids: Option<Vec<i32>> = output.get("topk_ids").and_then(|tensor| tensor.to_vec());
/// assert_eq!(ids.unwrap().len(), 3 * 2); // two experts of each token
/// # Ok(())
/// # }
/// ```
#[doc(inline)]
pub use moesaic_engine::Output;

/// The reason a layer could not be made or called.
///
/// ```
/// use moesaic::{EngineError, Input};
///
/// # use moesaic::example::{engine, spec, weights};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let layer = engine().layer(&spec(), &weights())?;
/// let short = [0.0f32; 7];
/// let error = layer.forward(&Input::new(1, &short)).unwrap_err();
/// assert!(matches!(error, EngineError::Input { .. }), "{error}");
/// # Ok(())
/// # }
/// ```
#[doc(inline)]
pub use moesaic_engine::EngineError;

/// The reason that a layer cannot be made of a spec.
///
/// ```
/// use moesaic::{EngineError, LayerSpec, SpecReason};
///
/// # use moesaic::example::{engine, spec, weights};
/// // In code a spec may be anything; a layer checks it as the reader of TOML does.
/// let mut impossible = spec();
/// impossible.shape.top_k = 100;
/// let error = engine().layer(&impossible, &weights()).err();
/// let Some(EngineError::Spec(SpecReason::Invalid(problems))) = error else { panic!() };
/// assert!(!problems.is_empty());
/// ```
#[doc(inline)]
pub use moesaic_engine::SpecReason;

/// The reason that a weight is refused.
///
/// ```
/// use moesaic::{EngineError, Tensors, WeightReason};
///
/// # use moesaic::example::{engine, spec, weights};
/// let error = engine().layer(&spec(), &Tensors::new()).err();
/// let Some(EngineError::Weights(each)) = error else { panic!() };
/// let missing = |e: &EngineError| {
///     matches!(e, EngineError::Weight { reason: WeightReason::Missing { .. }, .. })
/// };
/// assert!(each.iter().all(missing)); // their shapes and types are in the reasons
/// ```
#[doc(inline)]
pub use moesaic_engine::WeightReason;

/// The reason that an input of a call is refused.
///
/// ```
/// use moesaic::{EngineError, Input, InputReason, Tensor, TensorError};
///
/// # use moesaic::example::{engine, spec, weights};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let layer = engine().layer(&spec(), &weights())?;
/// let mut input = Input { tokens: 2, ..Input::default() };
/// input.insert("x", Tensor::owned(&[2, 5], vec![0.0f32; 10]));
/// let Err(EngineError::Input { name, reason }) = layer.forward(&input) else { panic!() };
/// let found = vec![2, 5];
/// let wanted = vec![2, 8]; // the model has 8 dimensions
/// assert_eq!(name, "x");
/// assert_eq!(reason, InputReason::Tensor(TensorError::Shape { found, wanted }));
/// # Ok(())
/// # }
/// ```
#[doc(inline)]
pub use moesaic_engine::InputReason;

/// The reason why an output, or the memory for one, is refused.
///
/// ```
/// use moesaic::{EngineError, OutputReason};
///
/// # use moesaic::example::{engine, spec, wave, weights};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let layer = engine().layer(&spec(), &weights())?;
/// let mut short = [0.0f32; 16];
/// let error = layer.forward_into(&wave(24)[..], &mut short[..]).unwrap_err();
/// let EngineError::Output { reason: OutputReason::Slice { elements, expected, .. }, .. } = error
/// else {
///     panic!()
/// };
/// assert_eq!([elements, expected], [16, 24]); // three tokens of 8
/// # Ok(())
/// # }
/// ```
#[doc(inline)]
pub use moesaic_engine::OutputReason;

/// The reason that the tensors of all ranks cannot be saved.
///
/// ```
/// use moesaic::{EngineError, SaveReason};
///
/// /// Whether another disk may help.
/// fn is_disk(error: &EngineError) -> bool {
///     matches!(error, EngineError::Save(SaveReason::Sink(_)))
/// }
/// ```
#[doc(inline)]
pub use moesaic_engine::SaveReason;

/// A tensor of another type, shape or length than is wanted.
///
/// ```
/// use moesaic::{Tensor, TensorError, DType};
///
/// let found = Tensor::owned(&[2], vec![1i32, 2]).check(DType::F32, &[2]);
/// assert_eq!(found, Err(TensorError::DType { found: DType::I32, wanted: DType::F32 }));
/// ```
#[doc(inline)]
pub use moesaic_tensor::TensorError;

#[doc(inline)]
pub use moesaic_tensor::TensorKind;
/// Compares a type and shape with the wanted ones. Bindings for other languages check their
/// callers' memory so before kernels read it.
///
/// ```
/// use moesaic::{DType, TensorKind, check_kind};
///
/// let found = TensorKind { dtype: DType::F32, shape: &[3, 8] };
/// let wanted = TensorKind { dtype: DType::F32, shape: &[5, 8] };
/// let error = check_kind(found, wanted).unwrap_err();
/// assert_eq!(error.to_string(), "has shape [3, 8], expected [5, 8]");
/// ```
#[doc(inline)]
pub use moesaic_tensor::check_kind;

/// The routing decision of a call, copied to the host for [`Statistics`].
///
/// ```
/// use moesaic::{Record, Statistics};
///
/// let (ids, weights) = ([0, 1, 0, 3], [0.7, 0.3, 0.6, 0.4]); // two tokens
/// let record = Record {
///     experts: 4,
///     top_k: 2,
///     ids: &ids,
///     weights: &weights,
///     locations: None,
///     with_rows: 4,
/// };
/// assert_eq!(Statistics::of(&record).loads, [2, 1, 0, 1]);
/// ```
#[doc(inline)]
pub use moesaic_engine::Record;

/// The load of each expert, and the number of dropped tokens.
///
/// ```
/// # use moesaic::{Record, Statistics};
/// # let (ids, weights) = ([0, 1, 0, 3], [0.7, 0.3, 0.6, 0.4]);
/// # let record = Record {
/// #     experts: 4, top_k: 2, ids: &ids, weights: &weights, locations: None, with_rows: 4,
/// # };
/// let statistics = Statistics::of(&record); // the record of two tokens
/// assert_eq!((statistics.total(), statistics.idle(), statistics.overflow()), (4, 1, 0));
/// ```
#[doc(inline)]
pub use moesaic_engine::Statistics;

/// An address in the memory of a device, as a [`RawCall`] takes it. On a CPU it is the address of a
/// slice, on a GPU what CUDA or HIP allocated: `cudarc`'s and PyTorch's pointers are such.
///
/// ```
/// use moesaic::{Ptr, RawCall};
///
/// # use moesaic::example::{engine, spec, wave, weights};
/// # fn main() -> Result<(), moesaic::Error> {
/// let layer = engine().layer(&spec(), &weights())?; // on a CPU
/// let (x, mut y) = (wave(24), vec![0.0f32; 24]);
/// let tensors = [("x", Ptr(x.as_ptr() as u64)), ("y", Ptr(y.as_mut_ptr() as u64))];
/// // SAFETY: both hold three tokens, and a CPU is done when the call returns.
/// layer.forward(unsafe { RawCall::new(3, &tensors) })?;
/// # Ok(())
/// # }
/// ```
#[doc(inline)]
pub use moesaic_target::Ptr;

/// A device, as [`Engine::device`](crate::Engine::device) lends it to you and as
/// [`collectives`](crate::collectives) take it.
///
/// Use it to allocate and fill memory for a [`RawCall`] or for a collective operation. Copies and
/// launches run in the order in which you call them: [`Device::upload`] returns as soon as you may
/// reuse your bytes, [`Device::download`] waits for everything before it. moesaic's backends
/// implement the trait; you only call it.
///
/// ```
/// use moesaic::{Buffer, Device, DeviceError};
/// use std::sync::Arc;
///
/// /// Device memory that holds rows of f32 from call to call.
/// struct Rows {
///     device: Arc<dyn Device>,
///     buffer: Buffer,
/// }
///
/// impl Rows {
///     fn of(device: &Arc<dyn Device>, values: &[f32]) -> Result<Rows, DeviceError> {
///         let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
///         let buffer = device.alloc(bytes.len())?;
///         device.upload(&bytes, &buffer, 0)?;
///         Ok(Rows { device: device.clone(), buffer })
///     }
///
///     fn byte(&self, offset: usize) -> Result<u8, DeviceError> {
///         let mut byte = [0];
///         self.device.download(&self.buffer, offset, &mut byte)?;
///         Ok(byte[0])
///     }
/// }
/// # let engine = moesaic::example::engine();
/// # let rows = Rows::of(engine.device(), &[1.0, 2.0])?;
/// # assert_eq!(rows.byte(7)?, 0x40);
/// # Ok::<(), DeviceError>(())
/// ```
#[doc(inline)]
pub use moesaic_target::Device;

/// The properties of a device: its name, best target, cores and memory.
///
/// ```
/// use moesaic::DeviceInfo;
///
/// fn describe(info: &DeviceInfo) -> String {
///     let memory = info.memory_bytes.map_or("unknown".to_string(), |bytes| {
///         format!("{} GiB", bytes >> 30)
///     });
///     format!("{} ({}), {} cores or multiprocessors, memory: {memory}", info.name, info.target, info.units)
/// }
/// # assert!(describe(moesaic::example::engine().device_info()).contains("cpu:"));
/// ```
#[doc(inline)]
pub use moesaic_target::DeviceInfo;

/// Memory of a device, freed when its last owner drops it.
///
/// ```
/// use moesaic::Buffer;
///
/// # use moesaic::example::engine;
/// # fn main() -> Result<(), moesaic::Error> {
/// let engine = engine();
/// let buffer: Buffer = engine.device().alloc(64)?;
/// engine.device().upload(&[1, 2, 3, 4], &buffer, 0)?;
/// let mut bytes = [0; 2];
/// engine.device().download(&buffer, 2, &mut bytes)?; // waits for the device
/// assert_eq!(bytes, [3, 4]);
/// # Ok(())
/// # }
/// ```
#[doc(inline)]
pub use moesaic_target::Buffer;

/// A call on device memory that you own, such as another library's tensors.
///
/// ```
/// use moesaic::RawCall;
///
/// # use moesaic::example::{engine, spec, wave, weights};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let engine = engine();
/// let layer = engine.layer(&spec(), &weights())?;
/// let (x, y) = (engine.device().alloc(96)?, engine.device().alloc(96)?);
/// let bytes: Vec<u8> = wave(24).into_iter().flat_map(f32::to_le_bytes).collect();
/// engine.device().upload(&bytes, &x, 0)?;
/// let tensors = [("x", x.ptr()), ("y", y.ptr())];
/// // SAFETY: both hold three tokens, and live until the device is done.
/// layer.forward(unsafe { RawCall::new(3, &tensors) })?;
/// engine.device().synchronize()?;
/// # Ok(())
/// # }
/// ```
#[doc(inline)]
pub use moesaic_engine::RawCall;

/// A number type of tensors in host memory: f32, f16, bf16, i32 or i64.
///
/// ```
/// use moesaic::{Element, Tensor};
///
/// fn ones<E: Element>(number: E) -> Tensor<'static> {
///     Tensor::owned(&[4], vec![number; 4])
/// }
/// assert_eq!(ones(1.0f32).dtype, f32::DTYPE);
/// ```
#[doc(inline)]
pub use moesaic_tensor::Element;

//! Memory of the caller, at every address that kernels can use, and at those
//! that they cannot.

use super::Case;
use super::cases::{of_type, small};
use super::layers::engines;
use super::simulated::{SIMULATORS, open};
use moesaic::target::{Buffer, Device, Ptr};
use moesaic::{
    CallInput, DType, Engine, EngineError, Layer, RawBackward, RawCall, RngKey, Tensor, Training,
};

const TOKENS: usize = 9;

/// Type and width of rows, and what they are aligned to on a GPU.
const ROWS: [(DType, usize, usize); 5] = [
    (DType::F32, 24, 16),
    (DType::F32, 6, 8),
    (DType::Bf16, 64, 16),
    (DType::Bf16, 6, 4),
    (DType::Bf16, 7, 2),
];

/// Bytes on the device, some bytes into their buffer.
struct Shifted {
    buffer: Buffer,
    shift: usize,
    length: usize,
}

impl Shifted {
    fn new(device: &dyn Device, bytes: &[u8], shift: usize) -> Shifted {
        let buffer = device.alloc(bytes.len() + 64).unwrap();
        device.upload(bytes, &buffer, shift).unwrap();
        let length = bytes.len();
        Shifted {
            buffer,
            shift,
            length,
        }
    }

    fn ptr(&self) -> Ptr {
        Ptr(self.buffer.ptr().0 + self.shift as u64)
    }

    fn read(&self, device: &dyn Device) -> Vec<u8> {
        let mut bytes = vec![0; self.length];
        device
            .download(&self.buffer, self.shift, &mut bytes)
            .unwrap();
        bytes
    }
}

/// The output, from and to memory that is shifted.
fn raw(
    layer: &Layer,
    device: &dyn Device,
    case: &Case,
    shift: usize,
) -> Result<Vec<u8>, EngineError> {
    let input = case.input();
    let x = Shifted::new(device, &input.tensors["x"].data, shift);
    let y = Shifted::new(device, &vec![0; x.length], shift);
    let tensors = [("x", x.ptr()), ("y", y.ptr())];
    // SAFETY: both hold the call's rows, and outlive the download, which waits.
    let call = unsafe { RawCall::new(TOKENS, &tensors) };
    layer.forward(call)?;
    Ok(y.read(device))
}

fn check(engine: &Engine, gpu: bool) {
    for (dtype, width, on_gpu) in ROWS {
        let case = Case::random(&of_type(dtype, small(width, 40, 3, 2)), TOKENS, 3);
        let layer = engine.layer(&case.spec, &case.host_weights()).unwrap();
        let expected = layer.forward(&case.input()).unwrap();
        let aligned = if gpu { on_gpu } else { dtype.size() };
        let found = raw(&layer, &**engine.device(), &case, aligned).unwrap();
        assert_eq!(found, *expected.get("y").unwrap().data, "{dtype} {width}");
        let error = raw(&layer, &**engine.device(), &case, aligned / 2).unwrap_err();
        let text = format!("is no multiple of {aligned} bytes; its kernels take {aligned} bytes");
        assert!(matches!(error, EngineError::Misaligned { .. }), "{error}");
        assert!(error.to_string().contains(&text), "{error}");
    }
}

#[test]
fn on_cpus() {
    engines().iter().for_each(|engine| check(engine, false));
}

#[test]
fn on_gpus() {
    SIMULATORS
        .iter()
        .for_each(|target| check(&open(target), true));
}

#[test]
fn backward() {
    let engine = open("sim:sm_80");
    let case = Case::random(&small(24, 20, 3, 2), TOKENS, 4);
    let layer = engine
        .training_layer(&case.spec, &case.host_weights(), Training::default())
        .unwrap();
    let passed = layer.forward_train(&case.input(), RngKey::default());
    let saved = passed.unwrap().1;
    let dy = Tensor::owned(&[TOKENS, 24], vec![1.0f32; TOKENS * 24]);
    let expected = layer.backward(&saved, &dy, false).unwrap();
    let device = &**engine.device();
    let run = |shifts: [usize; 2]| {
        let dy = Shifted::new(device, &dy.data, shifts[0]);
        let dx = Shifted::new(device, &vec![0; dy.length], shifts[1]);
        let gradients = [("dy", dy.ptr()), ("dx", dx.ptr())];
        // SAFETY: both hold the call's rows, and outlive the download.
        let call = unsafe { RawBackward::new(&gradients) };
        layer.backward(&saved, call, false)?;
        Ok(dx.read(device))
    };
    let found: Result<Vec<u8>, EngineError> = run([16, 48]);
    assert_eq!(found.unwrap(), *expected.get("dx").unwrap().data);
    for (shifts, name) in [([4, 16], "dy"), ([16, 8], "dx")] {
        let error = run(shifts).unwrap_err().to_string();
        let start = format!("tensor `{name}` lies at 0x");
        assert!(error.starts_with(&start), "{error}");
    }
}

/// A layer without weights says what is missing before it writes anything, whatever the call is.
#[test]
fn calls_name_every_weight_that_the_layer_lacks() {
    let engine = engines().remove(0);
    let case = Case::random(&small(8, 16, 4, 2), 3, 7);
    let layer = engine
        .layer_without_weights(&case.spec, Training::default())
        .unwrap();
    let missing = |error: EngineError, weight: &str| {
        assert!(
            matches!(&error, EngineError::NoWeight { name } if name == weight),
            "{error}"
        );
    };
    let input = case.input();
    let x: Vec<f32> = case.input.x.iter().map(|&v| v as f32).collect();
    missing(layer.forward(&input).unwrap_err(), "router.weight");
    missing(
        layer
            .route(CallInput::from(&input).reading(&["counts"]))
            .unwrap_err(),
        "router.weight",
    );
    let error = layer.forward_train(&input, RngKey::default()).err();
    missing(error.unwrap(), "router.weight");
    let mut y = vec![7f32; x.len()];
    missing(
        layer.forward_into(&x[..], &mut y).unwrap_err(),
        "router.weight",
    );

    let mut tensors = vec![
        ("x", Ptr(x.as_ptr() as u64)),
        ("y", Ptr(y.as_mut_ptr() as u64)),
    ];
    let weights = case.host_weights();
    for (name, weight) in weights
        .iter()
        .filter(|(name, _)| *name != "experts.up.weight")
    {
        tensors.push((name, Ptr(weight.data.as_ptr() as u64)));
    }
    // SAFETY: x, y and weights have the sizes of the spec, and outlive the call.
    let call = unsafe { RawCall::new(3, &tensors) };
    missing(layer.forward(call).unwrap_err(), "experts.up.weight");
    assert_eq!(y, vec![7.0; x.len()]);
}

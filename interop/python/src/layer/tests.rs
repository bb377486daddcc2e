//! Both passes on simulated GPUs, by addresses of their memory.

use super::*;
use moesaic::spec::canonical_tensors;
use moesaic::{Buffer, Device};
use moesaic::{Engine, Input, RngKey, Tensor, Tensors, Training};

const TEXT: &str = "shape = { model_dim = 8, hidden_dim = 16, experts = 4, top_k = 2 }";
const TOKENS: usize = 3;
const ROWS: usize = TOKENS * 8;
const KEY: RngKey = RngKey {
    seed: 0,
    step: 0,
    layer: 0,
    first_token: 0,
};

fn wave(elements: usize, salt: usize) -> Vec<f32> {
    let values = (0..elements).map(|i| ((i + salt) as f32 * 0.7).sin());
    values.collect()
}

/// The names of tensors, as a call's.
fn names(list: &[&str]) -> Vec<String> {
    list.iter().map(|name| name.to_string()).collect()
}

/// Values in memory of a device.
struct OnDevice(Buffer, usize);

impl OnDevice {
    fn new(device: &dyn Device, values: &[f32]) -> OnDevice {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_ne_bytes()).collect();
        let buffer = device.alloc(bytes.len()).unwrap();
        device.upload(&bytes, &buffer, 0).unwrap();
        OnDevice(buffer, bytes.len())
    }

    fn address(&self) -> u64 {
        self.0.ptr().0
    }

    fn read(&self, device: &dyn Device) -> Vec<f32> {
        let mut bytes = vec![0; self.1];
        device.download(&self.0, 0, &mut bytes).unwrap();
        let values = bytes.as_chunks::<4>().0.iter();
        values.map(|value| f32::from_ne_bytes(*value)).collect()
    }
}

/// A layer on a simulated GPU, and its weights there.
struct Gpu {
    layer: Layer,
    engine: Engine,
    weights: Tensors<'static>,
    placed: Vec<(String, OnDevice)>,
}

/// The tensors that both passes give.
#[derive(Debug, PartialEq)]
struct Results {
    y: Vec<f32>,
    dx: Vec<f32>,
    gradients: Vec<Vec<f32>>,
}

impl Gpu {
    fn new(backend: &str) -> Gpu {
        let spec = Spec::read(TEXT).unwrap();
        let place = Place::of(backend);
        let engine = engines::engine_at(&place).unwrap();
        let (mut weights, mut placed) = (Tensors::new(), Vec::new());
        for (at, tensor) in canonical_tensors(&spec.spec).into_iter().enumerate() {
            let values = wave(tensor.shape.iter().product(), at);
            let memory = OnDevice::new(&**engine.device(), &values);
            placed.push((tensor.name.clone(), memory));
            weights.insert(tensor.name, Tensor::owned(&tensor.shape, values));
        }
        let layer = Layer { spec, place };
        Gpu {
            layer,
            engine,
            weights,
            placed,
        }
    }

    fn device(&self) -> &dyn Device {
        &**self.engine.device()
    }

    fn on(&self, values: &[f32]) -> OnDevice {
        OnDevice::new(self.device(), values)
    }

    fn bound(&self, brought: Vec<String>) -> BoundLayer {
        let given = self.placed.iter().map(|(name, memory)| {
            let shape = &self.weights[name.as_str()].shape;
            let shape = shape.iter().map(|size| *size as u64).collect();
            Given(name.clone(), memory.address(), "f32".to_string(), shape)
        });
        let given: Vec<Given> = given.collect();
        BoundLayer::new(&self.layer, &given, brought).unwrap()
    }

    /// Runs both passes by a layer that copies from and to the host.
    fn wanted(&self, x: &[f32], dy: &[f32]) -> Results {
        let spec = &self.layer.spec.spec;
        let training = Training::default();
        let owning = self.engine.training_layer(spec, &self.weights, training);
        let owning = owning.unwrap();
        let run = owning.forward_train(&Input::new(TOKENS, x), KEY);
        let (output, saved) = run.unwrap();
        let dy = Tensor::owned(&[TOKENS, 8], dy.to_vec());
        let back = owning.backward(&saved, &dy, false).unwrap();
        let gradient = |(name, _): &(String, OnDevice)| owning.gradient(name).unwrap().to_f32();
        Results {
            y: output.y().to_f32(),
            dx: back.get("dx").unwrap().to_f32(),
            gradients: self.placed.iter().map(gradient).collect(),
        }
    }

    /// Runs both passes where the tensors lie.
    fn found(&self, x: &[f32], dy: &[f32]) -> Results {
        let zeros = |count: usize| self.on(&vec![0f32; count]);
        let (x, y, dy, dx) = (self.on(x), zeros(ROWS), self.on(dy), zeros(ROWS));
        let forward = self.bound(names(&["x", "y"]));
        let run = forward.trained(TOKENS, &[x.address(), y.address()], Key(KEY), None);
        let state = run.unwrap();
        let mut brought = names(&["x", "dy", "dx"]);
        let mut addresses = vec![x.address(), dy.address(), dx.address()];
        let mut gradients = Vec::new();
        for (name, memory) in &self.placed {
            let gradient = zeros(memory.1 / 4);
            brought.push(format!("grad.{name}"));
            addresses.push(gradient.address());
            gradients.push(gradient);
        }
        let backward = self.bound(brought);
        let ran = backward.differentiated(&state, TOKENS, &addresses, false);
        ran.unwrap();
        let elsewhere = BoundLayer {
            place: Place::cpu(),
            ..backward
        };
        let moved = elsewhere.differentiated(&state, TOKENS, &addresses, false);
        let Err(Failure::Invalid(problem)) = moved else {
            panic!("backward ran elsewhere");
        };
        assert!(problem.contains("another stream"), "{problem}");
        let read = |memory: &OnDevice| memory.read(self.device());
        Results {
            y: read(&y),
            dx: read(&dx),
            gradients: gradients.iter().map(read).collect(),
        }
    }
}

#[test]
fn calls_take_memory_of_a_gpu() {
    let _turn = engines::lock(&engines::TURNS);
    let (x, dy) = (wave(ROWS, 5), wave(ROWS, 9));
    for backend in ["sim:sm_80", "sim:gfx942"] {
        let gpu = Gpu::new(backend);
        let wanted = gpu.wanted(&x, &dy);
        assert_eq!(gpu.found(&x, &dy), wanted, "{backend}");
        let (x, y) = (gpu.on(&x), gpu.on(&[0f32; ROWS]));
        let forward = gpu.bound(names(&["x", "y"]));
        let run = forward.evaluated(TOKENS, &[x.address(), y.address()], None);
        run.unwrap();
        assert_eq!(y.read(gpu.device()), wanted.y, "{backend}");
    }
}

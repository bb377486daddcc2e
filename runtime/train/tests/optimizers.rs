//! Compares optimizers with numbers of PyTorch 2.15 and with themselves.

use moesaic_kernel::DType;
use moesaic_tensor::{Tensor, Tensors};
use moesaic_train::{AdamW, Optimizer, Sgd, TrainError, clip_norm};
use moesaic_weights::{Checkpoint, write_safetensors};

const START: [f32; 4] = [0.5, -1.25, 3.0, 0.001];
const GRADIENTS: [[f32; 4]; 3] = [
    [0.1, -0.2, 0.3, 1e-4],
    [0.05, 0.4, -0.3, 0.0],
    [-0.7, 0.1, 0.2, -1e-3],
];

fn named(values: &[f32]) -> Tensors<'static> {
    Tensors::from([("w", Tensor::copied(&[2, values.len() / 2], values))])
}

fn run(optimizer: &mut impl Optimizer, weights: &mut Tensors<'_>, gradients: &[[f32; 4]]) {
    for gradient in gradients {
        let step = optimizer.step(weights, &named(gradient));
        step.unwrap_or_else(|e| panic!("{e}"));
    }
}

/// Checks that three steps end at PyTorch's numbers, to rounding.
fn expect(mut optimizer: impl Optimizer, want: [f64; 4]) {
    let mut weights = named(&START);
    run(&mut optimizer, &mut weights, &GRADIENTS);
    for (got, want) in weights["w"].to_f32().iter().zip(want) {
        let error = (f64::from(*got) - want).abs();
        assert!(error <= 3e-7 * want.abs().max(1e-3), "{got} is not {want}");
    }
}

#[test]
fn sgd_is_that_of_pytorch() {
    let plain = [
        0.5550000071525574,
        -1.2799999713897705,
        2.9800000190734863,
        0.0010900001507252455,
    ];
    expect(Sgd::new(0.1), plain);
    let momentum = [
        0.5333999991416931,
        -1.2818000316619873,
        2.955700159072876,
        0.0010729001369327307,
    ];
    expect(Sgd::with_momentum(0.1, 0.9), momentum);
    let nesterov = Sgd {
        nesterov: true,
        ..Sgd::with_momentum(0.1, 0.9)
    };
    expect(
        nesterov,
        [
            0.5850600004196167,
            -1.3086200952529907,
            2.9401302337646484,
            0.0011556100798770785,
        ],
    );
}

#[test]
fn adamw_is_that_of_pytorch() {
    let decayed = AdamW {
        betas: [0.9, 0.95],
        weight_decay: 0.1,
        ..AdamW::new(0.01)
    };
    expect(
        decayed,
        [
            0.4841899871826172,
            -1.2440766096115112,
            2.9791836738586426,
            -0.010059074498713017,
        ],
    );
    let plain = [
        0.4858510196208954,
        -1.2478175163269043,
        2.988168716430664,
        -0.009857116267085075,
    ];
    expect(
        AdamW {
            weight_decay: 0.0,
            ..AdamW::new(0.01)
        },
        plain,
    );
    let spared = AdamW {
        decays: |name| name != "w",
        ..AdamW::new(0.01)
    };
    expect(spared, plain);
}

/// Worked out by hand: the first step of Adam has the size of the learning rate.
#[test]
fn the_first_step_of_adam_has_the_size_of_the_rate() {
    let mut weights = named(&[1.0, 1.0, 1.0, 1.0]);
    let mut adam = AdamW {
        weight_decay: 0.0,
        ..AdamW::new(0.125)
    };
    run(&mut adam, &mut weights, &[[3.0, -0.02, 1e-3, 0.0]]);
    for (got, want) in weights["w"].to_f32().iter().zip([0.875, 1.125, 0.875, 1.0]) {
        assert!((got - want).abs() < 1e-5, "{got} is not {want}");
    }
    let mut decayed = Sgd {
        weight_decay: 0.5,
        ..Sgd::new(0.5)
    };
    let mut weights = named(&[1.0, -2.0, 0.0, 4.0]);
    run(&mut decayed, &mut weights, &[[0.0, 1.0, 0.0, 0.0]]);
    assert_eq!(weights["w"].to_f32(), [0.75, -2.0, 0.0, 3.0]);
}

/// A run saved to a file after two steps, read back and continued ends at the same bits as an
/// uninterrupted one.
#[test]
fn a_saved_state_continues_the_run() {
    fn both<O: Optimizer + Clone>(fresh: O) {
        let (mut whole, mut first, mut second) = (fresh.clone(), fresh.clone(), fresh);
        let mut expected = named(&START);
        run(&mut whole, &mut expected, &GRADIENTS);
        let mut weights = named(&START);
        run(&mut first, &mut weights, &GRADIENTS[..2]);

        let file = tempfile::NamedTempFile::new().expect("a file");
        write_safetensors(file.path(), &first.state()).expect("it is written");
        let saved = Checkpoint::open(file.path()).expect("it is read");
        let names: Vec<String> = saved.names().map(String::from).collect();
        let read = |name: String| (name.clone(), saved.read(&name).expect("a tensor"));
        second
            .restore(&names.into_iter().map(read).collect())
            .expect("it is a state");
        run(&mut second, &mut weights, &GRADIENTS[2..]);
        assert_eq!(weights, expected);
        assert_eq!(second.state(), whole.state());
    }
    both(AdamW::new(0.01));
    both(Sgd::with_momentum(0.1, 0.9));
    both(Sgd::new(0.1));
}

#[test]
fn what_has_no_gradient_stays() {
    let mut weights = named(&START);
    weights.insert("frozen", Tensor::owned(&[1], vec![7.0f32]));
    run(&mut AdamW::new(0.1), &mut weights, &GRADIENTS);
    assert_eq!(weights["frozen"].to_f32(), [7.0]);
}

#[test]
fn a_step_that_cannot_be_taken_changes_nothing() {
    let mut adam = AdamW::new(0.1);
    for (name, shape) in [("w", vec![4]), ("v", vec![2, 2])] {
        let mut weights = named(&START);
        let gradients = Tensors::from([(name, Tensor::zeros(DType::F32, &shape))]);
        let error = adam
            .step(&mut weights, &gradients)
            .expect_err("it cannot be");
        assert!(matches!(error, TrainError::Tensor { name: n, .. } if n == name));
        assert_eq!(weights, named(&START));
        assert_eq!(adam.steps, 0);
    }
}

#[test]
fn clipping_keeps_the_direction() {
    let mut gradients = named(&[3.0, 0.0, 0.0, 4.0]);
    assert_eq!(clip_norm(&mut gradients, 1.0).unwrap(), 5.0);
    assert_eq!(gradients["w"].to_f32(), [0.6, 0.0, 0.0, 0.8]);
    assert!((clip_norm(&mut gradients, 2.0).unwrap() - 1.0).abs() < 1e-7);
    assert_eq!(gradients["w"].to_f32(), [0.6, 0.0, 0.0, 0.8]);
}

#[test]
fn gradients_of_16_bits_are_widened() {
    fn step(mut optimizer: impl Optimizer, gradients: &Tensors<'_>) -> Vec<f32> {
        let mut weights = named(&START);
        optimizer.step(&mut weights, gradients).unwrap();
        weights["w"].to_f32()
    }
    let halves = |values: &[f32]| {
        let tensor = Tensor::rounded(DType::Bf16, &[2, 2], values).into_static();
        Tensors::from([("w", tensor)])
    };
    let narrow = halves(&GRADIENTS[0]);
    let wide = named(&narrow["w"].to_f32());
    assert_ne!(wide["w"].to_f32(), GRADIENTS[0]);
    assert_eq!(step(AdamW::new(0.1), &narrow), step(AdamW::new(0.1), &wide));
    assert_eq!(step(Sgd::new(0.1), &narrow), step(Sgd::new(0.1), &wide));
    let mut clipped = halves(&[3.0, 0.0, 0.0, 4.0]);
    assert_eq!(clip_norm(&mut clipped, 1.0).unwrap(), 5.0);
    assert!(clipped == halves(&[0.6, 0.0, 0.0, 0.8]));
    let integers = Tensors::from([("w", Tensor::owned(&[2, 2], vec![1i32; 4]))]);
    let error = Sgd::new(0.1).step(&mut named(&START), &integers);
    assert!(matches!(error, Err(TrainError::Tensor { .. })));
}

//! PyTorch's CPU generator, so that published runs can be started from the
//! weights and tokens that they were started from.
//!
//! `torch.manual_seed` seeds an MT19937 (Matsumoto and Nishimura, 1998).
//! `uniform_` on f32 takes the low 24 bits of one draw per value. `randn` on
//! f32, from sixteen values on, is Box-Muller over blocks of sixteen uniforms:
//! values `j` and `j + 8` come from the radius of uniform `j` and the angle of
//! uniform `j + 8`.

/// The generator after `torch.manual_seed`.
pub struct TorchRandom {
    state: Vec<u32>,
    next: usize,
}

const LENGTH: usize = 624;
const SHIFT: usize = 397;

impl TorchRandom {
    /// `torch.manual_seed(seed)`.
    pub fn new(seed: u32) -> TorchRandom {
        let mut state = vec![seed];
        for i in 1..LENGTH {
            let last: u32 = state[i - 1];
            let mixed = (last ^ (last >> 30)).wrapping_mul(1_812_433_253);
            state.push(mixed.wrapping_add(i as u32));
        }
        TorchRandom {
            state,
            next: LENGTH,
        }
    }

    fn bits(&mut self) -> u32 {
        if self.next == LENGTH {
            self.refill();
        }
        let mut y = self.state[self.next];
        self.next += 1;
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c_5680;
        y ^= (y << 15) & 0xefc6_0000;
        y ^ (y >> 18)
    }

    fn refill(&mut self) {
        for i in 0..LENGTH {
            let joined =
                (self.state[i] & 0x8000_0000) | (self.state[(i + 1) % LENGTH] & 0x7fff_ffff);
            let twist = if joined & 1 == 1 { 0x9908_b0df } else { 0 };
            self.state[i] = self.state[(i + SHIFT) % LENGTH] ^ (joined >> 1) ^ twist;
        }
        self.next = 0;
    }

    fn unit(&mut self) -> f32 {
        (self.bits() & 0xff_ffff) as f32 / (1 << 24) as f32
    }

    /// `torch.empty(count).uniform_(-bound, bound)` in f32.
    pub fn uniform(&mut self, count: usize, bound: f64) -> Vec<f32> {
        let (from, to) = (-bound as f32, bound as f32);
        (0..count)
            .map(|_| self.unit() * (to - from) + from)
            .collect()
    }

    /// `torch.randn(count)` in f32, up to the last bit or two: torch takes
    /// logarithm and angle functions of its own.
    pub fn normal(&mut self, count: usize) -> Vec<f32> {
        assert_eq!(count % 16, 0, "whole blocks only");
        let mut values: Vec<f32> = (0..count).map(|_| self.unit()).collect();
        for block in values.chunks_exact_mut(16) {
            let (first, second) = block.split_at_mut(8);
            for (a, b) in first.iter_mut().zip(second) {
                let radius = (-2.0 * (1.0 - f64::from(*a)).ln()).sqrt();
                let (sin, cos) = (std::f64::consts::TAU * f64::from(*b)).sin_cos();
                (*a, *b) = ((radius * cos) as f32, (radius * sin) as f32);
            }
        }
        values
    }
}

/// Values printed by PyTorch 2.15 on a CPU.
#[test]
fn draws_what_torch_draws() {
    // torch.manual_seed(1); torch.nn.Linear(256, 512).weight.ravel()[:4]
    let weight = TorchRandom::new(1).uniform(4, 1.0 / 16.0);
    close(
        &weight,
        &[0.032_203_95, -0.027_586_14, -0.012_116_34, 0.029_335_56],
        1e-8,
    );
    // torch.manual_seed(0); torch.randn([64])[:10]
    let expected = [
        -1.1258398,
        -1.1523602,
        -0.25057858,
        -0.4338788,
        0.84871036,
        0.69200915,
        -0.31601277,
        -2.1152194,
        0.32227492,
        -1.2633348,
    ];
    close(&TorchRandom::new(0).normal(64)[..10], &expected, 1e-6);
}

fn close(got: &[f32], expected: &[f32], tolerance: f32) {
    for (g, e) in got.iter().zip(expected) {
        assert!(
            (g - e).abs() <= tolerance,
            "{got:?} instead of {expected:?}"
        );
    }
}

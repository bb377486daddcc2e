//! `wgmma`: each swizzle and major of both operands, types, widths, A from
//! registers, signs, and the prelude's functions.

mod form;

use super::{Probe, lanes, small};
use crate::bench::{Bench, File, Kernel, Takes, Trouble, Value};
use crate::random::Random;
use crate::report::{Row, same};
use form::{Form, Left, text};
use moesaic_hardware::swizzle::Swizzle;
use moesaic_hardware::wgmma::{
    Accumulator, Descriptor, Major, MmaElement, SharedMemory, SourceA, Wgmma, WgmmaKind,
};
use tera::Context;

/// Layouts, then types and widths, then what kernels call.
pub const PROBES: &[Probe] = &[
    Probe::new("wgmma layouts", 90, layouts),
    Probe::new("wgmma types and widths", 90, kinds),
    Probe::new("wgmma, prelude", 90, prelude),
];

/// Words of shared memory: A in the first 16 KB, then B.
const WORDS: usize = 12 * 1024;
const B_AT: u32 = 16 * 1024;
const CASES: usize = 2;
const MAJORS: [Major; 2] = [Major::K, Major::Mn];

/// A form with the places of its operands.
struct Case {
    form: Form,
    a_swizzle: Swizzle,
    b_swizzle: Swizzle,
}

fn kind(n: usize, element: MmaElement, accumulator: Accumulator) -> WgmmaKind {
    WgmmaKind::new(n, element, accumulator).expect("the probe names kinds there are")
}

fn layouts(bench: &Bench, random: &mut Random) -> Result<Vec<Row>, Trouble> {
    let mut cases = Vec::new();
    for (index, swizzle) in Swizzle::ALL.into_iter().enumerate() {
        for a_major in MAJORS {
            for b_major in MAJORS {
                let elements = [MmaElement::Bf16, MmaElement::F16];
                cases.push(Case {
                    form: Form {
                        left: Left::Shared(a_major),
                        b_major,
                        ..Form::plain(kind(96, elements[index % 2], Accumulator::F32))
                    },
                    a_swizzle: swizzle,
                    b_swizzle: swizzle,
                });
            }
        }
    }
    run(bench, random, &cases, None)
}

fn kinds(bench: &Bench, random: &mut Random) -> Result<Vec<Row>, Trouble> {
    let types = [
        (MmaElement::F16, Accumulator::F16),
        (MmaElement::F16, Accumulator::F32),
        (MmaElement::Bf16, Accumulator::F32),
        (MmaElement::Tf32, Accumulator::F32),
    ];
    let mut cases = Vec::new();
    for (index, n) in [8, 16, 64, 136, 192, 256].into_iter().enumerate() {
        for (element, accumulator) in types {
            for left in [Left::Shared(Major::K), Left::Registers] {
                cases.push(Case {
                    form: Form {
                        left,
                        negate: [index % 3 == 1, index % 2 == 1],
                        accumulate: index != 2,
                        ..Form::plain(kind(n, element, accumulator))
                    },
                    a_swizzle: Swizzle::B128,
                    b_swizzle: Swizzle::ALL[index % 4],
                });
            }
        }
    }
    run(bench, random, &cases, None)
}

fn prelude(bench: &Bench, random: &mut Random) -> Result<Vec<Row>, Trouble> {
    let mut rows = Vec::new();
    for (name, element) in [("f16", MmaElement::F16), ("bf16", MmaElement::Bf16)] {
        let cases: Vec<Case> = form::PRELUDE_COLUMNS
            .map(|n| Case {
                form: Form {
                    prelude: true,
                    ..Form::plain(kind(n, element, Accumulator::F32))
                },
                a_swizzle: Swizzle::B128,
                b_swizzle: Swizzle::B128,
            })
            .into();
        rows.extend(run(bench, random, &cases, Some(name))?);
    }
    Ok(rows)
}

fn run(
    bench: &Bench,
    random: &mut Random,
    cases: &[Case],
    prelude: Option<&str>,
) -> Result<Vec<Row>, Trouble> {
    // Cases may share a kernel and differ in the places of operands.
    let mut forms: Vec<Form> = cases.iter().map(|case| case.form).collect();
    forms.sort_by_key(Form::symbol);
    forms.dedup_by_key(|form| form.symbol());
    let mut context = Context::new();
    context.insert("words", &WORDS);
    context.insert("forms", &forms.iter().map(text).collect::<Vec<_>>());
    context.insert("wgmma_columns", &form::PRELUDE_COLUMNS);
    context.insert("wgmma_types", &prelude.as_slice());
    let kernel = |form: &Form| Kernel {
        symbol: form.symbol(),
        threads: 128,
        shared_bytes: 4 * WORDS as u32,
        cluster: 1,
        takes: [vec![Takes::Words; 3], vec![Takes::I64; 2]].concat(),
    };
    let program = bench.load(File {
        name: "wgmma.cu",
        activations: "bf16",
        context,
        kernels: forms.iter().map(kernel).collect(),
    })?;
    let mut rows = Vec::new();
    for case in cases {
        let inputs = Inputs::new(case, random);
        let mut d = inputs.d.clone();
        let values = &mut [
            Value::Read(&inputs.image),
            Value::Read(&inputs.registers),
            Value::Words(&mut d),
            Value::I64(inputs.left.encode().cast_signed()),
            Value::I64(inputs.right.encode().cast_signed()),
        ];
        bench.run(&program, &case.form.symbol(), CASES, values)?;
        let result = same("d", &d, &inputs.by_table(case));
        rows.push(Row::compared(case.name(), CASES, result));
    }
    Ok(rows)
}

impl Case {
    fn name(&self) -> String {
        let a = match self.form.left {
            Left::Registers => "registers".to_string(),
            Left::Shared(major) => format!("{major:?} {:?}", self.a_swizzle),
        };
        let b = format!("{:?} {:?}", self.form.b_major, self.b_swizzle);
        format!("{}, A {a}, B {b}", self.form.symbol())
    }
}

/// The operands of the cases of a launch.
struct Inputs {
    image: Vec<u32>,
    registers: Vec<u32>,
    d: Vec<u32>,
    left: Descriptor,
    right: Descriptor,
}

impl Inputs {
    fn new(case: &Case, random: &mut Random) -> Inputs {
        let kind = case.form.kind;
        let element = kind.element();
        // Every place holds a number, so that a read at the wrong place gives a
        // wrong sum.
        let mut many =
            |count: usize| -> Vec<u32> { (0..count).map(|_| small(element, random)).collect() };
        let image = many(CASES * WORDS);
        let registers = many(CASES * 16 * 32);
        let d = (0..CASES * 4 * kind.d_registers() * 32).map(|_| match kind.accumulator() {
            Accumulator::F16 => small(MmaElement::F16, random),
            _ => (random.range(-50, 50) as f32).to_bits(),
        });
        let a_major = match case.form.left {
            Left::Shared(major) => major,
            Left::Registers => Major::K,
        };
        Inputs {
            image,
            registers,
            d: d.collect(),
            left: descriptor(0, a_major, case.a_swizzle, 64),
            right: descriptor(B_AT, case.form.b_major, case.b_swizzle, kind.n()),
        }
    }

    fn by_table(&self, case: &Case) -> Vec<u32> {
        let kind = case.form.kind;
        let mut d = lanes(&self.d);
        let results = d.chunks_exact_mut(4 * kind.d_registers());
        let registers = lanes(&self.registers);
        for (index, d) in results.enumerate() {
            let image = &self.image[index * WORDS..][..WORDS];
            let bytes: Vec<u8> = image.iter().flat_map(|word| word.to_le_bytes()).collect();
            let a = std::array::from_fn(|r| registers[16 * index + r]);
            let call = Wgmma {
                kind,
                a: match case.form.left {
                    Left::Shared(major) => SourceA::Shared(self.left, major),
                    Left::Registers => SourceA::Registers(&a),
                },
                b: self.right,
                b_major: case.form.b_major,
                accumulate: case.form.accumulate,
                negate_a: case.form.negate[0],
                negate_b: case.form.negate[1],
            };
            let shared = SharedMemory {
                base: 0,
                bytes: &bytes,
            };
            call.execute(shared, d)
                .unwrap_or_else(|error| panic!("the probe lays out a wrong operand: {error}"));
        }
        d.concat()
    }
}

/// Describes tiles at a multiple of 1024, with offsets beyond the least that
/// fits, so that a wrong offset reads other numbers.
fn descriptor(start: u32, major: Major, swizzle: Swizzle, extent: usize) -> Descriptor {
    let eight = 8 * swizzle.span();
    // Distances between groups of 8 rows, and between spans.
    let (near, far) = (eight, 2048);
    let (leading, stride) = match (major, swizzle) {
        (Major::K, Swizzle::None) => (near * extent as u32 / 8 + 256, near),
        (Major::K, _) => (16, near),
        (Major::Mn, Swizzle::None) => (128, 256),
        (Major::Mn, _) => (far, near),
    };
    Descriptor {
        start,
        leading,
        stride,
        base_offset: 0,
        swizzle,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moesaic_hardware::wgmma::SharedOperand;

    /// Checks that distinct elements lie at distinct places, inside the tile.
    #[test]
    fn operands_fit_and_do_not_overlap() {
        for swizzle in Swizzle::ALL {
            for major in MAJORS {
                let descriptor = descriptor(B_AT, major, swizzle, 256);
                let operand = SharedOperand {
                    descriptor,
                    major,
                    element: MmaElement::F16,
                };
                let mut places = Vec::new();
                operand.chunks(256, |address| places.push(address));
                places.sort_unstable();
                assert!(places.iter().all(|at| *at + 16 <= 4 * WORDS as u32));
                let count = places.len();
                places.dedup();
                assert_eq!((count, places.len()), (512, 512), "{major:?} {swizzle:?}");
            }
        }
    }
}

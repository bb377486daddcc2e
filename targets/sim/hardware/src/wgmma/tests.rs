use super::*;
use crate::swizzle::Swizzle;
use crate::testing::{Random, covers, naive, pack};

const HALVES: [MmaElement; 2] = [MmaElement::F16, MmaElement::Bf16];

fn kind(n: usize, element: MmaElement, accumulator: Accumulator) -> WgmmaKind {
    WgmmaKind::new(n, element, accumulator).unwrap()
}

fn size(element: MmaElement) -> usize {
    if element == MmaElement::Tf32 { 4 } else { 2 }
}

/// Places an operand as TMA would: boxes whose rows are one span of the
/// swizzle, each aligned to its atom; without swizzle, rows of 16 bytes.
/// Returns the descriptor of k block `block`.
///
/// K-major: rows are `mn`, the box holds all of them. MN-major: rows are k,
/// boxes stand side by side along `mn`.
fn place(
    image: &mut [u8],
    base: u32,
    at: u32,
    (major, swizzle, element): (Major, Swizzle, MmaElement),
    [extent, depth]: [usize; 2],
    value: impl Fn(usize, usize) -> f32,
) -> Descriptor {
    let bytes = size(element);
    let wide = swizzle.span() as usize / bytes;
    let (contiguous, rows) = match major {
        Major::K => (depth, extent),
        Major::Mn => (extent, depth),
    };
    let box_bytes = (rows * swizzle.span() as usize).next_multiple_of(swizzle.atom() as usize);
    for row in 0..rows {
        for column in 0..contiguous {
            let (mn, k) = match major {
                Major::K => (row, column),
                Major::Mn => (column, row),
            };
            let plain =
                column / wide * box_bytes + row * swizzle.span() as usize + column % wide * bytes;
            let address = swizzle.apply(at + plain as u32) - base;
            let bits = pack(element, value(mn, k)).to_le_bytes();
            image[address as usize..][..bytes].copy_from_slice(&bits[..bytes]);
        }
    }
    let boxes = box_bytes as u32;
    let eight = 8 * swizzle.span();
    let (leading, stride) = match (major, swizzle) {
        (Major::K, Swizzle::None) => (boxes, 128),
        (Major::K, _) => (16, eight),
        (Major::Mn, Swizzle::None) => (128, boxes),
        (Major::Mn, _) => (boxes, eight),
    };
    Descriptor {
        start: at,
        leading,
        stride,
        base_offset: 0,
        swizzle,
    }
}

fn bits_of_d(kind: WgmmaKind, value: f32) -> u32 {
    match kind.accumulator() {
        Accumulator::F16 => pack(MmaElement::F16, value),
        _ => value.to_bits(),
    }
}

fn registers_of_d(kind: WgmmaKind, matrix: &[f32]) -> Vec<Lanes> {
    let mut list = vec![[0; 32]; 4 * kind.d_registers()];
    for (index, register) in list.iter_mut().enumerate() {
        let (warp, r) = (index / kind.d_registers(), index % kind.d_registers());
        for (lane, word) in register.iter_mut().enumerate() {
            for part in 0..kind.packed_d() {
                let (row, column) = kind.d_index(warp, r, part, lane);
                *word |= bits_of_d(kind, matrix[row * kind.n() + column]) << (16 * part);
            }
        }
    }
    list
}

fn registers_of_a(kind: WgmmaKind, a: &[f32]) -> [Lanes; 16] {
    let mut list = [[0; 32]; 16];
    for_each_a(kind, |warp, register, part, lane| {
        let (row, depth) = kind.a_index(warp, register, part, lane);
        let bits = pack(kind.element(), a[row * kind.k() + depth]);
        list[4 * warp + register][lane] |= bits << (16 * part);
    });
    list
}

const BASE: u32 = 1024;

struct Case {
    kind: WgmmaKind,
    a: Option<(Major, Swizzle)>,
    b: (Major, Swizzle),
    accumulate: bool,
    negate: [bool; 2],
}

fn check_case(case: &Case, random: &mut Random) {
    let (kind, n, k) = (case.kind, case.kind.n(), case.kind.k());
    let (a, b) = (random.matrix(64 * k, -8, 8), random.matrix(k * n, -8, 8));
    let c = random.matrix(64 * n, -50, 50);
    let at = BASE + 1024 * random.range(0, 3) as u32;
    let mut d = registers_of_d(kind, &c);
    execute_case(case, at, (&a, &b), &mut d);
    let sign = match case.negate {
        [a, b] if a == b => 1.0,
        _ => -1.0,
    };
    let signed: Vec<f32> = a.iter().map(|value| sign * value).collect();
    let kept = if case.accumulate { 1.0 } else { 0.0 };
    let start: Vec<f32> = c.iter().map(|value| kept * value).collect();
    let expected = naive(&signed, &b, &start, [64, n, k]);
    assert!(
        d == registers_of_d(kind, &expected),
        "{kind:?} {:?} {:?}",
        case.a,
        case.b
    );
}

/// Lays out the operands from `at` on, and runs the instruction.
fn execute_case(case: &Case, at: u32, (a, b): (&[f32], &[f32]), d: &mut [Lanes]) {
    let (kind, n, k) = (case.kind, case.kind.n(), case.kind.k());
    let mut image = vec![0xff; 64 * 1024];
    let layout = |(major, swizzle)| (major, swizzle, kind.element());
    let registers = registers_of_a(kind, a);
    let source = match case.a {
        None => SourceA::Registers(&registers),
        Some(form) => {
            let of_a = |row: usize, depth: usize| a[row * k + depth];
            let descriptor = place(&mut image, BASE, at, layout(form), [64, k], of_a);
            SourceA::Shared(descriptor, form.0)
        }
    };
    let of_b = |column: usize, depth: usize| b[depth * n + column];
    let call = Wgmma {
        kind,
        a: source,
        b: place(&mut image, BASE, at + 16384, layout(case.b), [n, k], of_b),
        b_major: case.b.0,
        accumulate: case.accumulate,
        negate_a: case.negate[0],
        negate_b: case.negate[1],
    };
    let shared = SharedMemory {
        base: BASE,
        bytes: &image,
    };
    call.execute(shared, d).unwrap();
}

#[test]
fn products_are_exact_in_every_layout() {
    let mut random = Random::new(8);
    for swizzle in Swizzle::ALL {
        for (a_major, b_major) in [
            (Major::K, Major::K),
            (Major::Mn, Major::K),
            (Major::K, Major::Mn),
            (Major::Mn, Major::Mn),
        ] {
            for n in [8, 64, 96, 256] {
                let case = Case {
                    kind: kind(n, HALVES[n / 8 % 2], Accumulator::F32),
                    a: Some((a_major, swizzle)),
                    b: (b_major, Swizzle::ALL[(n / 8 + 1) % 4]),
                    accumulate: n != 64,
                    negate: [n == 96, n == 8],
                };
                check_case(&case, &mut random);
            }
        }
    }
}

#[test]
fn every_n_and_type_with_a_from_either_place() {
    let mut random = Random::new(9);
    let types = [
        (MmaElement::F16, Accumulator::F16),
        (MmaElement::F16, Accumulator::F32),
        (MmaElement::Bf16, Accumulator::F32),
        (MmaElement::Tf32, Accumulator::F32),
    ];
    for (step, n) in (8..=256).step_by(8).enumerate() {
        let (element, accumulator) = types[step % 4];
        let swizzle = Swizzle::ALL[step / 4 % 4];
        for a in [None, Some((Major::K, swizzle))] {
            let case = Case {
                kind: kind(n, element, accumulator),
                a,
                b: (Major::K, swizzle),
                accumulate: true,
                negate: [false; 2],
            };
            check_case(&case, &mut random);
        }
    }
}

/// Splits a tile of 64 k values into four products that step through it by
/// moving the start address, as kernels do.
#[test]
fn descriptors_step_along_k() {
    let mut random = Random::new(10);
    let (kind, n) = (kind(64, MmaElement::Bf16, Accumulator::F32), 64);
    for (major, step) in [(Major::K, 32), (Major::Mn, 2048)] {
        let (a, b) = (random.matrix(64 * 64, -8, 8), random.matrix(64 * 64, -8, 8));
        let mut image = vec![0xff; 32 * 1024];
        let form = (major, Swizzle::B128, MmaElement::Bf16);
        let of_a = |row: usize, depth: usize| a[row * 64 + depth];
        let of_b = |column: usize, depth: usize| b[depth * n + column];
        let da = place(&mut image, 0, 0, form, [64, 64], of_a);
        let db = place(&mut image, 0, 16384, form, [n, 64], of_b);
        let mut d = vec![[0; 32]; 4 * kind.d_registers()];
        for block in 0..4 {
            let moved = |d: Descriptor| Descriptor {
                start: d.start + block * step,
                ..d
            };
            let call = Wgmma {
                kind,
                a: SourceA::Shared(moved(da), major),
                b: moved(db),
                b_major: major,
                accumulate: block > 0,
                negate_a: false,
                negate_b: false,
            };
            let shared = SharedMemory {
                base: 0,
                bytes: &image,
            };
            call.execute(shared, &mut d).unwrap();
        }
        let expected = naive(&a, &b, &[0.0; 64 * 64], [64, n, 64]);
        assert!(d == registers_of_d(kind, &expected), "{major:?}");
    }
}

#[test]
fn registers_are_bijections() {
    for (n, element, accumulator) in [
        (8, MmaElement::F16, Accumulator::F16),
        (96, MmaElement::Bf16, Accumulator::F32),
        (256, MmaElement::Tf32, Accumulator::F32),
    ] {
        let kind = kind(n, element, accumulator);
        let mut places = Vec::new();
        for_each_a(kind, |w, r, part, lane| {
            places.push(kind.a_index(w, r, part, lane))
        });
        assert!(covers(places.into_iter(), [64, kind.k()], 1));
        let lanes = (0..4 * kind.d_registers()).flat_map(|i| (0..32).map(move |lane| (i, lane)));
        let of_d = lanes.flat_map(|(i, lane)| {
            let (warp, register) = (i / kind.d_registers(), i % kind.d_registers());
            (0..kind.packed_d()).map(move |part| kind.d_index(warp, register, part, lane))
        });
        assert!(covers(of_d, [64, n], 1), "{kind:?}");
    }
}

#[test]
fn single_places_of_d() {
    let f32s = kind(32, MmaElement::Bf16, Accumulator::F32);
    assert_eq!(f32s.d_index(0, 0, 0, 0), (0, 0));
    assert_eq!(f32s.d_index(2, 7, 0, 13), (32 + 3 + 8, 8 + 2 + 1));
    let halves = kind(32, MmaElement::F16, Accumulator::F16);
    assert_eq!(halves.d_index(2, 3, 1, 13), (32 + 3 + 8, 8 + 2 + 1));
}

#[test]
fn descriptors_keep_their_fields() {
    // The usual one of a K-major tile under the 128-byte swizzle.
    let usual = Descriptor {
        start: 0x8400,
        leading: 16,
        stride: 1024,
        base_offset: 0,
        swizzle: Swizzle::B128,
    };
    assert_eq!(usual.encode(), 0x840 | 1 << 16 | 64 << 32 | 1 << 62);
    for swizzle in Swizzle::ALL {
        let descriptor = Descriptor {
            start: 0x3_fff0,
            leading: 0x1_2340,
            stride: 0x2_0010,
            base_offset: 5,
            swizzle,
        };
        assert_eq!(Descriptor::decode(descriptor.encode()), descriptor);
    }
}

#[test]
fn chunks_are_what_a_product_reads() {
    for major in [Major::K, Major::Mn] {
        for swizzle in Swizzle::ALL {
            let mut image = vec![0; 16384];
            let form = (major, swizzle, MmaElement::F16);
            let descriptor = place(&mut image, 0, 0, form, [64, 16], |_, _| 1.0);
            let operand = SharedOperand {
                descriptor,
                major,
                element: MmaElement::F16,
            };
            let mut count = 0;
            operand.chunks(64, |address| {
                let chunk = &mut image[address as usize..][..16];
                assert!(chunk.iter().any(|byte| *byte != 0));
                chunk.fill(0);
                count += 1;
            });
            assert_eq!((count, image.iter().all(|byte| *byte == 0)), (128, true));
        }
    }
}

/// Returns the error of a product whose B is `b`, in 4 KB of shared memory from
/// 1024 on, and checks that D is unchanged.
fn refusal(n: usize, element: MmaElement, b: Descriptor, b_major: Major) -> Option<String> {
    let kind = kind(n, element, Accumulator::F32);
    let call = Wgmma {
        kind,
        a: SourceA::Registers(&[[0; 32]; 16]),
        b,
        b_major,
        accumulate: false,
        negate_a: false,
        negate_b: false,
    };
    let shared = SharedMemory {
        base: 1024,
        bytes: &[0; 4096],
    };
    let mut d = vec![[7; 32]; 4 * kind.d_registers()];
    let error = call.execute(shared, &mut d).err();
    assert!(error.is_none() || d.iter().flatten().all(|word| *word == 7));
    error.map(|error| error.to_string())
}

#[test]
fn what_cannot_be_done_is_named() {
    let b = Descriptor {
        start: 1024,
        leading: 16,
        stride: 1024,
        base_offset: 0,
        swizzle: Swizzle::B128,
    };
    assert_eq!(refusal(32, MmaElement::Bf16, b, Major::K), None);
    let outside = refusal(40, MmaElement::Bf16, b, Major::K).unwrap();
    let place = "operand B of wgmma reads shared memory at 0x1400";
    assert!(outside.contains(place), "{outside}");
    let low = Descriptor { start: 0, ..b };
    let error = refusal(8, MmaElement::Bf16, low, Major::K).unwrap();
    assert!(error.contains("at 0x0"), "{error}");
    assert_eq!(
        refusal(8, MmaElement::Tf32, b, Major::Mn).unwrap(),
        "wgmma reads Tf32 operands K-major only, not MN-major"
    );
    let offset = Descriptor {
        base_offset: 3,
        ..b
    };
    let error = refusal(8, MmaElement::F16, offset, Major::K).unwrap();
    assert!(error.contains("is 3:"), "{error}");
}

#[test]
fn there_are_no_other_kinds() {
    assert_eq!(WgmmaKind::new(12, MmaElement::F16, Accumulator::F32), None);
    assert_eq!(WgmmaKind::new(264, MmaElement::F16, Accumulator::F32), None);
    assert_eq!(WgmmaKind::new(8, MmaElement::Bf16, Accumulator::F16), None);
}

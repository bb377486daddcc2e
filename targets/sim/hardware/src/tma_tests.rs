use super::*;
use crate::testing::Random;

/// Returns the shared memory after a box load, by plain loops over elements.
fn naive_load(map: &TensorMap, coordinates: &[i32], memory: &[u8]) -> Vec<u8> {
    let size = map.element.bytes() as usize;
    let mut image = vec![0xcc; map.box_bytes() as usize];
    let extent = |dim: usize| {
        if dim < map.rank as usize {
            map.taken(dim)
        } else {
            1
        }
    };
    let mut place = 0;
    let outer = |dim| 0..extent(dim);
    for j4 in outer(4) {
        for j3 in outer(3) {
            for j2 in outer(2) {
                for j1 in outer(1) {
                    for j0 in outer(0) {
                        let source = element(map, coordinates, [j0, j1, j2, j3, j4]);
                        let value = match source {
                            Some(at) => memory[at..at + size].to_vec(),
                            None => fill(map)[..size].to_vec(),
                        };
                        let at = map.swizzle.apply(place as u32) as usize;
                        image[at..at + size].copy_from_slice(&value);
                        place += size;
                    }
                }
            }
        }
    }
    image
}

/// Byte offset of an element of the box in the tensor's memory.
fn element(map: &TensorMap, coordinates: &[i32], place: [u32; 5]) -> Option<usize> {
    let mut at = 0;
    for dim in 0..map.rank as usize {
        let step = if dim == 0 {
            1
        } else {
            map.element_strides[dim]
        };
        let index = i64::from(coordinates[dim]) + i64::from(place[dim] * step);
        if index < 0 || index >= map.dims[dim] as i64 {
            return None;
        }
        let stride = match dim {
            0 => u64::from(map.element.bytes()),
            _ => map.strides[dim - 1],
        };
        at += index as usize * stride as usize;
    }
    Some(at)
}

const BASE: u64 = 0x1_0000;

/// A random map over a small padded tensor, and coordinates around it.
fn random_case(random: &mut Random) -> (TensorMap, Vec<i32>, usize) {
    let element = ElementType::ALL[random.range(0, 9) as usize];
    let swizzle = Swizzle::ALL[random.range(0, 3) as usize];
    let rank = random.range(1, 5) as usize;
    let row = match swizzle {
        Swizzle::None => 16 * random.range(1, 6) as u32,
        _ => swizzle.span(),
    };
    let dims: Vec<u64> = (0..rank)
        .map(|dim| random.range(1, if dim == 0 { 40 } else { 6 }) as u64)
        .collect();
    let mut tile = vec![row / element.bytes()];
    tile.extend((1..rank).map(|_| random.range(1, 4) as u32));
    let mut map = TensorMap::dense(element, BASE, &dims, &tile, swizzle);
    let mut bytes = (dims[0] * u64::from(element.bytes())).next_multiple_of(16);
    for (stride, size) in map.strides.iter_mut().zip(&dims[1..]) {
        *stride = bytes + 16 * random.range(0, 2) as u64;
        bytes = *stride * size;
    }
    for stride in &mut map.element_strides[1..rank] {
        *stride = [1, 1, 2, 3][random.range(0, 3) as usize];
    }
    if element.is_float() && random.range(0, 1) == 1 {
        map.fill = OobFill::Nan;
    }
    let around = |size: &u64| random.range(-5, *size as i64 + 5) as i32;
    let coordinates = dims.iter().map(around).collect();
    (map, coordinates, bytes as usize)
}

#[test]
fn loads_are_slices() {
    let mut random = Random::new(6);
    for _ in 0..2000 {
        let (map, coordinates, bytes) = random_case(&mut random);
        let memory: Vec<u8> = (0..bytes).map(|_| random.next() as u8).collect();
        assert_eq!(map.validate(), Ok(()), "{map:?}");
        let base = 1024 * random.range(0, 3) as u32;
        let mut image = vec![0xcc; map.box_bytes() as usize];
        let mut moved = 0;
        box_moves(&map, &coordinates, base, |piece| {
            let to = (piece.shared - base) as usize..(piece.shared - base + piece.bytes) as usize;
            moved += piece.bytes;
            match piece.global {
                Some(address) => {
                    let from = (address - BASE) as usize;
                    image[to].copy_from_slice(&memory[from..from + piece.bytes as usize]);
                }
                None => image[to].copy_from_slice(&fill(&map)[..piece.bytes as usize]),
            }
        })
        .unwrap();
        assert_eq!(moved, map.box_bytes());
        assert_eq!(
            image,
            naive_load(&map, &coordinates, &memory),
            "{map:?} {coordinates:?}"
        );
    }
}

/// A store writes exactly the elements of the box that are in the tensor,
/// never padding.
#[test]
fn stores_are_clipped() {
    let mut random = Random::new(7);
    for _ in 0..500 {
        let (map, coordinates, bytes) = random_case(&mut random);
        let (mut written, mut expected) = (vec![0; bytes], vec![0; bytes]);
        box_moves(&map, &coordinates, 0, |piece| {
            if let Some(address) = piece.global {
                let at = (address - BASE) as usize;
                written[at..at + piece.bytes as usize]
                    .iter_mut()
                    .for_each(|count| *count += 1);
            }
        })
        .unwrap();
        let extent = |dim| {
            if dim < map.rank as usize {
                map.taken(dim)
            } else {
                1
            }
        };
        let extents: [u32; 5] = std::array::from_fn(extent);
        for place in 0..extents.iter().product::<u32>() {
            let mut rest = place;
            let place = extents.map(|extent| {
                let index = rest % extent;
                rest /= extent;
                index
            });
            if let Some(at) = element(&map, &coordinates, place) {
                let size = map.element.bytes() as usize;
                expected[at..at + size]
                    .iter_mut()
                    .for_each(|count| *count += 1);
            }
        }
        assert_eq!(written, expected);
    }
}

#[test]
fn the_pattern_hangs_on_the_address() {
    let map = TensorMap::dense(ElementType::Bf16, 0, &[64, 8], &[64, 1], Swizzle::B128);
    let mut first = Vec::new();
    for line in 0..9 {
        let mut at = None;
        box_moves(&map, &[0, 0], 128 * line, |m| at = at.or(Some(m.shared))).unwrap();
        first.push(at.unwrap() - 128 * line);
    }
    assert_eq!(first, [0, 16, 32, 48, 64, 80, 96, 112, 0]);
}

#[test]
fn what_cannot_be_done_is_named() {
    let wide = TensorMap::dense(ElementType::F32, 0, &[8, 8], &[8, 8], Swizzle::None);
    let refuse = |map: &TensorMap, at: &[i32], shared| {
        box_moves(map, at, shared, |_| panic!("moved")).unwrap_err()
    };
    assert_eq!(refuse(&wide, &[0, 0], 64), TmaError::SharedAddress(64));
    assert_eq!(refuse(&wide, &[0], 0), TmaError::Rank { asked: 1, map: 2 });
    let narrow = TensorMap {
        swizzle: Swizzle::B64,
        ..wide
    };
    let error = TmaError::NarrowSwizzle {
        bytes: 32,
        span: 64,
    };
    assert_eq!(refuse(&narrow, &[0, 0], 0), error);
    assert!(
        error
            .to_string()
            .contains("make the row as long as the span")
    );
}

#[test]
fn fills_are_whole_elements() {
    let mut map = TensorMap::dense(ElementType::F16, 0, &[8], &[8], Swizzle::None);
    assert_eq!(fill(&map), [0; 16]);
    map.fill = OobFill::Nan;
    assert_eq!(fill(&map), [0xff, 0x7f].repeat(8)[..]);
    map.element = ElementType::F32;
    let value = f32::from_le_bytes(fill(&map)[4..8].try_into().unwrap());
    assert!(value.is_nan() && value.to_bits() == 0x7fff_ffff);
}

fn reduced<const N: usize>(
    op: BulkReduction,
    element: ElementType,
    old: [u8; N],
    new: [u8; N],
) -> Result<[u8; N], ReduceError> {
    let mut memory = [old, old].concat();
    reduce(op, element, &mut memory, &[new, new].concat())?;
    assert_eq!(memory[..N], memory[N..]);
    Ok(std::array::from_fn(|i| memory[i]))
}

#[test]
fn reductions_of_integers() {
    use BulkReduction as R;
    let u = |op, a: u32, b: u32| {
        let bytes = reduced(op, ElementType::U32, a.to_le_bytes(), b.to_le_bytes());
        u32::from_le_bytes(bytes.unwrap())
    };
    assert_eq!(u(R::Add, u32::MAX, 3), 2);
    assert_eq!(
        (u(R::Min, 5, u32::MAX), u(R::Max, 5, u32::MAX)),
        (5, u32::MAX)
    );
    assert_eq!(
        (u(R::And, 6, 3), u(R::Or, 6, 3), u(R::Xor, 6, 3)),
        (2, 7, 5)
    );
    let s = |op, a: i32, b: i32| {
        let bytes = reduced(op, ElementType::S32, a.to_le_bytes(), b.to_le_bytes());
        i32::from_le_bytes(bytes.unwrap())
    };
    assert_eq!((s(R::Min, 5, -1), s(R::Max, 5, -1)), (-1, 5));
    let l = reduced(
        R::Max,
        ElementType::S64,
        (-9i64).to_le_bytes(),
        8i64.to_le_bytes(),
    );
    assert_eq!(l, Ok(8i64.to_le_bytes()));
}

#[test]
fn reductions_of_floats() {
    use BulkReduction as R;
    let bf16 = |op, a: f32, b: f32| {
        let [a, b] = [a, b].map(|v| bf16_from_f32(v).to_le_bytes());
        let bytes = reduced(op, ElementType::Bf16, a, b).unwrap();
        f32_from_bf16(u16::from_le_bytes(bytes))
    };
    // 256 + 1 is a tie between 256 and 258, 258 + 1 one between 258 and 260.
    assert_eq!(
        (bf16(R::Add, 256.0, 1.0), bf16(R::Add, 258.0, 1.0)),
        (256.0, 260.0)
    );
    assert_eq!(
        (bf16(R::Min, 2.0, -3.0), bf16(R::Max, 2.0, f32::NAN)),
        (-3.0, 2.0)
    );
    assert!(bf16(R::Min, 0.0, -0.0).is_sign_negative());
    let f16 = reduced(R::Add, ElementType::F16, [0xff, 0x7b], [0xff, 0x7b]);
    assert_eq!(f16, Ok([0x00, 0x7c]));
    let [a, b] = [1.5f32, -4.25].map(f32::to_le_bytes);
    assert_eq!(
        reduced(R::Add, ElementType::F32, a, b),
        Ok((-2.75f32).to_le_bytes())
    );
    let error = reduced(R::Max, ElementType::F32, a, b).unwrap_err();
    assert_eq!(error.to_string(), "TMA has no Max of F32");
    assert!(reduced(R::And, ElementType::F16, [0; 2], [0; 2]).is_err());
    assert!(reduced(R::Add, ElementType::U8, [0], [0]).is_err());
}

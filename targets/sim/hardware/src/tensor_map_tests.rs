use super::*;

fn sample() -> TensorMap {
    let tile = [64, 256, 1, 2, 4];
    let dims = [72, 1000, 3, 1 << 32, 5];
    let mut map = TensorMap::dense(ElementType::Bf16, 0x7000, &dims, &tile, Swizzle::B128);
    map.strides = [144, 144_000, 432_000, (1 << 40) - 16];
    map.element_strides = [1, 2, 3, 8, 1];
    map.fill = OobFill::Nan;
    map
}

#[test]
fn maps_survive_their_bytes() {
    let map = sample();
    assert_eq!(TensorMap::decode(&map.encode().unwrap()), Ok(map));
    let flat = TensorMap::dense(ElementType::U8, 16, &[7], &[256], Swizzle::None);
    assert_eq!(TensorMap::decode(&flat.encode().unwrap()), Ok(flat));
}

#[test]
fn garbage_is_no_map() {
    let good = sample().encode().unwrap();
    for index in [0, 9, 50, 88, 99, 101, 119, 127] {
        let mut bytes = good;
        bytes[index] ^= 4;
        assert_eq!(TensorMap::decode(&bytes), Err(TensorMapFault::NotAMap));
    }
    assert_eq!(TensorMap::decode(&[0; 128]), Err(TensorMapFault::NotAMap));
}

#[test]
fn dense_strides_and_bytes() {
    let map = TensorMap::dense(ElementType::F32, 0, &[8, 5, 3], &[4, 2, 2], Swizzle::None);
    assert_eq!((map.rank, map.strides), (3, [32, 160, 0, 0]));
    assert_eq!(map.box_bytes(), 64);
    assert_eq!(map.tile, [4, 2, 2, 1, 1]);
    assert_eq!(sample().box_bytes(), 128 * 128 * 4);
}

fn broken(change: impl FnOnce(&mut TensorMap)) -> TensorMapFault {
    let mut map = sample();
    assert_eq!(map.validate(), Ok(()));
    change(&mut map);
    assert_eq!(map.encode().unwrap_err(), map.validate().unwrap_err());
    map.validate().unwrap_err()
}

#[test]
fn every_rule_is_checked() {
    use TensorMapFault as E;
    assert_eq!(broken(|m| m.rank = 0), E::Rank(0));
    assert_eq!(broken(|m| m.rank = 6), E::Rank(6));
    assert_eq!(broken(|m| m.address = 8), E::Address(8));
    assert_eq!(broken(|m| m.dims[1] = 0), E::Dim { dim: 1, size: 0 });
    let size = (1 << 32) + 1;
    assert_eq!(broken(|m| m.dims[4] = size), E::Dim { dim: 4, size });
    let stride = |dim, bytes| E::Stride { dim, bytes };
    assert_eq!(broken(|m| m.strides[0] = 152), stride(1, 152));
    assert_eq!(broken(|m| m.strides[3] = 1 << 40), stride(4, 1 << 40));
    assert_eq!(broken(|m| m.tile[1] = 257), E::Box { dim: 1, size: 257 });
    assert_eq!(broken(|m| m.tile[2] = 0), E::Box { dim: 2, size: 0 });
    assert_eq!(broken(|m| m.tile[0] = 12), E::InnerBytes(24));
    let swizzle = Swizzle::B64;
    let long = E::InnerSpan {
        bytes: 128,
        swizzle,
    };
    assert_eq!(broken(|m| m.swizzle = swizzle), long);
    let zero = E::ElementStride { dim: 0, stride: 0 };
    assert_eq!(broken(|m| m.element_strides[0] = 0), zero);
    let nine = E::ElementStride { dim: 2, stride: 9 };
    assert_eq!(broken(|m| m.element_strides[2] = 9), nine);
    let ints = E::NanOfIntegers(ElementType::U16);
    assert_eq!(broken(|m| m.element = ElementType::U16), ints);
}

#[test]
fn what_lies_beyond_the_rank_is_not_checked() {
    let mut map = sample();
    map.rank = 2;
    (map.dims[3], map.strides[2], map.tile[4]) = (0, 7, 999);
    assert_eq!(map.validate(), Ok(()));
}

#[test]
fn errors_name_the_rule() {
    let stride = TensorMapFault::Stride { dim: 1, bytes: 24 };
    assert_eq!(
        stride.to_string(),
        "the stride of dimension 1 is 24 bytes; it must be a multiple of 16 below 2^40"
    );
    let span = TensorMapFault::InnerSpan {
        bytes: 256,
        swizzle: Swizzle::B128,
    };
    assert_eq!(
        span.to_string(),
        "an innermost row of the box has 256 bytes; the swizzle allows 128"
    );
}

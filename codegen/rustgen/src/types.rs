//! Rust types of tensors.

use moesaic_kernel::{DType, Size};
use proc_macro2::{Literal, TokenStream};
use quote::quote;
use syn::Path;

/// Returns the Rust type of an element.
pub(crate) fn scalar(dtype: DType, facade: &Path) -> TokenStream {
    match dtype {
        DType::F32 => quote!(f32),
        DType::F16 => quote!(#facade::half::f16),
        DType::Bf16 => quote!(#facade::half::bf16),
        DType::I32 => quote!(i32),
        DType::I64 => quote!(i64),
    }
}

/// Returns nested arrays: `[[f32; 64]; 8]` for `[8, 64]`.
pub(crate) fn array(dtype: DType, shape: &[u64], facade: &Path) -> TokenStream {
    shape
        .iter()
        .rev()
        .fold(scalar(dtype, facade), |inner, &size| {
            let size = Literal::u64_unsuffixed(size);
            quote!([#inner; #size])
        })
}

/// Returns the sizes, if none depends on the token count.
pub(crate) fn constant(shape: &[Size]) -> Option<Vec<u64>> {
    let fixed = |size: &Size| match size {
        Size::Const(n) => Some(*n),
        _ => None,
    };
    shape.iter().map(fixed).collect()
}

/// Returns the type of one row, if the first size depends on the token count and no other does.
pub(crate) fn row(dtype: DType, shape: &[Size], facade: &Path) -> Option<TokenStream> {
    let (first, rest) = shape.split_first()?;
    match first {
        Size::Const(_) => None,
        _ => Some(array(dtype, &constant(rest)?, facade)),
    }
}

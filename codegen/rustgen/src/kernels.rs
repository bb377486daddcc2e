//! One argument struct per kernel entry, from the entry's own parameters.

use crate::docs::doc;
use crate::names::{Names, camel, field};
use moesaic_kernel::{Access, Entry, Param, ParamType, Scalar};
use moesaic_plan::{EntryId, LayerPlan, Step};
use proc_macro2::{Literal, TokenStream};
use quote::{format_ident, quote};
use syn::Path;

/// Returns the module of kernels, with a module for each.
pub(crate) fn module(plan: &LayerPlan, names: &Names) -> TokenStream {
    let Names {
        layer,
        kernels,
        visibility,
        facade,
        ..
    } = names;
    let about = doc(&format!(
        "The kernels of [`{layer}`](super::{layer}), to be launched one by one through \
         `Launcher`. Launch geometry is the target's and is read from its plan."
    ));
    let list = (0..plan.kernels.len()).map(|index| kernel_module(plan, index, facade));
    quote! {
        #about
        #[allow(dead_code)]
        #visibility mod #kernels { #(#list)* }
    }
}

fn kernel_module(plan: &LayerPlan, index: usize, facade: &Path) -> TokenStream {
    let kernel = &plan.kernels[index];
    let (name, module) = (&kernel.name, field(&kernel.name));
    let about = doc(&format!("The entries of kernel `{name}`."));
    let entries = kernel.entries.iter().enumerate().map(|(at, entry)| {
        let id = EntryId {
            kernel: index,
            entry: at,
        };
        let mut launches = plan.steps.iter().filter_map(Step::launch);
        let tensors = launches.find(|launch| launch.entry == id);
        let tensors = tensors.map_or(&[][..], |launch| &launch.tensors);
        let names: Vec<&str> = tensors.iter().map(|&id| &*plan[id].name).collect();
        entry_args(name, entry, &names)
    });
    quote! {
        #about
        pub mod #module {
            use #facade::typed::generated::kernel::*;
            #(#entries)*
        }
    }
}

/// Returns the argument struct of an entry. `tensors` are those that a forward pass binds to its
/// pointers, in order.
fn entry_args(kernel: &str, entry: &Entry, tensors: &[&str]) -> TokenStream {
    let (name, symbol, params) = (camel(&entry.symbol), &entry.symbol, &entry.params);
    let about = doc(&format!(
        "`{symbol}` {}.",
        entry.summary.trim_end_matches('.')
    ));
    let mut tensors = tensors.iter();
    let fields = params.iter().map(|param| match param.ty.tensor() {
        Some(_) => param_field(param, tensors.next().copied()),
        None => param_field(param, None),
    });
    let types = params.iter().map(|param| {
        let (name, ty) = (&param.name, param_type(param));
        quote!((#name, <#ty>::TYPE))
    });
    let count = Literal::usize_unsuffixed(params.len());
    let values = params.iter().map(|param| field(&param.name));
    quote! {
        #about
        #[derive(Clone, Copy, Debug)]
        pub struct #name { #(#fields)* }

        impl KernelArgs for #name {
            const KERNEL: &'static str = #kernel;
            const SYMBOL: &'static str = #symbol;
            const PARAMS: &'static [(&'static str, ParamType)] = &[#(#types),*];
            type Args = [Arg; #count];

            fn args(&self) -> Self::Args {
                [#(self.#values.arg()),*]
            }

            fn tokens(&self) -> i64 {
                self.tokens
            }
        }
    }
}

fn param_field(param: &Param, tensor: Option<&str>) -> TokenStream {
    let about = match param.ty.tensor() {
        Some((dtype, access)) => {
            let verb = match access {
                Access::Read => "Reads",
                Access::Write => "Writes",
                Access::ReadWrite => "Reads and writes",
            };
            let name = tensor.unwrap_or(&param.name);
            format!("{verb} `{name}`, {dtype} `{}`.", param.shape)
        }
        None if param.name == "tokens" => "The token count.".to_string(),
        None if param.name == "table_rows" => "The rows of `router.table`.".to_string(),
        None => format!("`{}`.", param.name),
    };
    let (about, name, ty) = (doc(&about), field(&param.name), param_type(param));
    quote!(#about pub #name: #ty,)
}

fn param_type(param: &Param) -> TokenStream {
    // The structs follow the portable target, which has no tensor maps.
    let (access, dtype) = match param.ty {
        ParamType::Scalar(Scalar::I64) => return quote!(i64),
        ParamType::Scalar(Scalar::F32) => return quote!(f32),
        ParamType::Tensor(dtype, access) => (access, dtype),
        ParamType::TensorMap(map) => (map.access, map.dtype),
    };
    let pointer = match access {
        Access::Read => quote!(In),
        Access::Write => quote!(Out),
        Access::ReadWrite => quote!(InOut),
    };
    // The module imports `bf16` along with the pointer types.
    let element = format_ident!("{}", dtype.name());
    quote!(#pointer<#element>)
}

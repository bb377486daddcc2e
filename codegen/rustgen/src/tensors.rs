//! The structs of weights, outputs and raw addresses.

use crate::docs::{self, doc};
use crate::names::{Names, field};
use crate::types::{array, constant, row, scalar};
use moesaic_plan::{LayerPlan, TensorPlan, TensorRole};
use moesaic_spec::{TensorSpec, canonical_tensors};
use proc_macro2::{Ident, Literal, TokenStream};
use quote::quote;

/// Returns the tensors of a role, in the order of the plan.
pub(crate) fn of_role(plan: &LayerPlan, role: TensorRole) -> impl Iterator<Item = &TensorPlan> {
    plan.tensors
        .iter()
        .filter(move |tensor| tensor.role == role)
}

/// Returns the struct of weights and its conversion to named tensors.
pub(crate) fn weights(plan: &LayerPlan, names: &Names) -> TokenStream {
    let Names {
        weights,
        layer,
        visibility,
        facade,
        ..
    } = names;
    let list = canonical_tensors(&plan.spec);
    let fields = list.iter().map(|tensor| weight_field(tensor, names));
    let pairs = list.iter().map(|TensorSpec { name, .. }| {
        let field = field(name);
        quote!((#name, #facade::typed::generated::host_tensor(self.#field)))
    });
    let about = doc(&format!(
        "The weights of [`{layer}`], row major. `{}::typed::tensor` views a flat slice \
         as the array that a field wants.",
        docs::path(facade)
    ));
    quote! {
        #about
        #[derive(Clone, Copy)]
        #[allow(dead_code)]
        #visibility struct #weights<'a> { #(#fields)* }

        #[allow(dead_code)]
        impl<'a> #weights<'a> {
            /// Returns the weights by canonical name, with shapes as data.
            pub fn named(&self) -> #facade::Tensors<'a> {
                #facade::typed::generated::weights([#(#pairs),*])
            }
        }
    }
}

fn weight_field(tensor: &TensorSpec, names: &Names) -> TokenStream {
    let TensorSpec {
        name,
        dtype,
        shape,
        meaning,
    } = tensor;
    let about = doc(&format!("`{name}`, {dtype} `{shape:?}`: {meaning}."));
    let sizes: Vec<u64> = shape.iter().map(|&n| n as u64).collect();
    let (field, ty) = (field(name), array(*dtype, &sizes, &names.facade));
    quote!(#about pub #field: &'a #ty,)
}

/// Returns the struct of all outputs of a call, `y` first.
pub(crate) fn output(plan: &LayerPlan, names: &Names) -> TokenStream {
    let mut tensors: Vec<&TensorPlan> = of_role(plan, TensorRole::Output).collect();
    tensors.sort_by_key(|tensor| tensor.name != "y");
    let about = format!(
        "The outputs of a call of [`{}`]; `T` is its token count.",
        names.layer
    );
    readable(&names.output, &about, &tensors, names)
}

/// Returns the struct of the routing decisions.
pub(crate) fn routing(plan: &LayerPlan, names: &Names) -> TokenStream {
    let tensors: Vec<&TensorPlan> = routed(plan, TensorRole::Output).collect();
    let about = format!(
        "The routing of a call of [`{}`]; `T` is its token count.",
        names.layer
    );
    readable(&names.routing, &about, &tensors, names)
}

/// Returns the tensors of a role that routing reads or writes.
pub(crate) fn routed(plan: &LayerPlan, role: TensorRole) -> impl Iterator<Item = &TensorPlan> {
    let steps = plan.routing_of(plan.evaluation_steps());
    let named = move |tensor: &&TensorPlan| {
        let mut names = steps.iter().flat_map(|step| plan.names(step));
        names.any(|name| name == tensor.name)
    };
    of_role(plan, role).filter(named)
}

/// Returns a struct of outputs, with the code that requests and fills it.
fn readable(name: &Ident, about: &str, tensors: &[&TensorPlan], names: &Names) -> TokenStream {
    let Names {
        visibility, facade, ..
    } = names;
    let fields = tensors.iter().map(|tensor| {
        let (about, ty) = (self::about(tensor), output_type(tensor, names));
        let field = field(&tensor.name);
        quote!(#about pub #field: #ty,)
    });
    let list = tensors.iter().map(|tensor| &tensor.name);
    let reads = tensors.iter().map(|tensor| {
        let (name, field) = (&tensor.name, field(&tensor.name));
        let read = match row(tensor.dtype, &tensor.shape, facade) {
            Some(_) => quote!(read_rows),
            None => quote!(read),
        };
        quote!(#field: #facade::typed::generated::#read(output, #name)?,)
    });
    let about = doc(about);
    quote! {
        #about
        #[derive(Clone, Debug, PartialEq)]
        #[allow(dead_code)]
        #visibility struct #name { #(#fields)* }

        #[allow(dead_code)]
        impl #name {
            /// The canonical names of the tensors.
            pub const NAMES: &'static [&'static str] = &[#(#list),*];

            fn read(output: &#facade::Output) -> ::std::result::Result<Self, #facade::EngineError> {
                Ok(#name { #(#reads)* })
            }
        }
    }
}

/// Returns the meaning of a tensor, as the doc of a field.
pub(crate) fn about(tensor: &TensorPlan) -> TokenStream {
    doc(&format!(
        "{}: {}.",
        docs::meaning(&tensor.name),
        docs::tensor(tensor)
    ))
}

/// Returns the type of an output: rows if it grows with the token count, otherwise an array, or a
/// scalar for one element.
pub(crate) fn output_type(tensor: &TensorPlan, names: &Names) -> TokenStream {
    let facade = &names.facade;
    if let Some(row) = row(tensor.dtype, &tensor.shape, facade) {
        return quote!(Vec<#row>);
    }
    match constant(&tensor.shape) {
        Some(shape) if shape == [1] => scalar(tensor.dtype, facade),
        Some(shape) => array(tensor.dtype, &shape, facade),
        // No tensor of a plan grows with the token count in an inner dimension. A flat list would
        // still be correct if one did.
        None => {
            let scalar = scalar(tensor.dtype, facade);
            quote!(Vec<#scalar>)
        }
    }
}

/// Returns the struct of addresses of an evaluation on device memory: inputs and `y`.
pub(crate) fn raw(plan: &LayerPlan, names: &Names) -> TokenStream {
    let about = format!(
        "Addresses of a call of [`{}`] on device memory.",
        names.layer
    );
    raw_call(&names.raw, &about, plan, names)
}

/// Returns the struct of addresses of a training call, with those of its losses. `plan` runs
/// backward.
pub(crate) fn raw_training(plan: &LayerPlan, names: &Names) -> TokenStream {
    let about = format!(
        "Addresses of a call of [`{}`] in training on device memory.",
        names.layer
    );
    raw_call(&names.raw_training, &about, plan, names)
}

fn raw_call(name: &Ident, about: &str, plan: &LayerPlan, names: &Names) -> TokenStream {
    let facade = &names.facade;
    let inputs = of_role(plan, TensorRole::Input).map(|tensor| (tensor, quote!(In)));
    let y = plan.tensor("y").into_iter().chain(losses(plan));
    let tensors: Vec<_> = inputs
        .chain(y.map(|tensor| (tensor, quote!(Out))))
        .collect();
    let tokens = quote! {
        /// The number of tokens in the call, `T`.
        pub tokens: usize,
    };
    let addresses = addresses(name, about, tokens, &tensors, names);
    let count = Literal::usize_unsuffixed(tensors.len());
    let pairs = tensors.iter().map(|(tensor, _)| {
        let (name, field) = (&tensor.name, field(&tensor.name));
        quote!((#name, self.#field.ptr()))
    });
    quote! {
        #addresses

        impl #facade::typed::RawArgs for #name {
            type Tensors = [(&'static str, #facade::typed::generated::Ptr); #count];

            fn tokens(&self) -> usize {
                self.tokens
            }

            fn tensors(&self) -> Self::Tensors {
                [#(#pairs),*]
            }
        }
    }
}

/// Returns the losses of a plan that runs backward, as named outputs.
pub(crate) fn losses(plan: &LayerPlan) -> impl Iterator<Item = &TensorPlan> {
    of_role(plan, TensorRole::Output).filter(|tensor| tensor.name.starts_with("loss."))
}

/// Returns the struct of addresses of a backward pass: `dy`, `dx`, and optional gradients of other
/// inputs. `plan` runs backward.
pub(crate) fn raw_backward(plan: &LayerPlan, names: &Names) -> TokenStream {
    let Names {
        raw,
        raw_training,
        raw_backward,
        layer,
        facade,
        ..
    } = names;
    let dy = of_role(plan, TensorRole::OutputGradient).map(|tensor| (tensor, quote!(In)));
    let results = of_role(plan, TensorRole::InputGradient).map(|tensor| (tensor, quote!(Out)));
    let tensors: Vec<_> = dy.chain(results).collect();
    let about = format!(
        "Addresses of a backward pass of [`{layer}`] on device memory; `T` is the token count of \
         its forward pass. Gradients without an address stay in the layer's memory."
    );
    let addresses = addresses(raw_backward, &about, TokenStream::new(), &tensors, names);
    let pairs = tensors.iter().map(|(tensor, _)| {
        let (name, field) = (&tensor.name, field(&tensor.name));
        if is_optional(tensor) {
            quote!(self.#field.map(|there| (#name, there.ptr())))
        } else {
            quote!(Some((#name, self.#field.ptr())))
        }
    });
    quote! {
        #addresses

        impl #facade::typed::RawGradients for #raw_backward {
            fn tensors(&self) -> Vec<(&'static str, #facade::typed::generated::Ptr)> {
                [#(#pairs),*].into_iter().flatten().collect()
            }
        }

        impl #facade::typed::TypedLayer for #layer {
            type Raw = #raw;
            type RawTraining = #raw_training;
            type RawBackward = #raw_backward;

            fn layer(&self) -> &#facade::Layer {
                &self.layer
            }
        }
    }
}

/// Returns true if the caller may omit the address of a tensor.
fn is_optional(tensor: &TensorPlan) -> bool {
    tensor.role == TensorRole::InputGradient && tensor.name != "dx"
}

/// The tensors of a call, each with the type of its address.
type Addressed<'p> = [(&'p TensorPlan, TokenStream)];

/// Returns a struct of addresses, after some other fields.
fn addresses(
    name: &Ident,
    about: &str,
    before: TokenStream,
    tensors: &Addressed<'_>,
    names: &Names,
) -> TokenStream {
    let Names {
        visibility, facade, ..
    } = names;
    let fields = tensors.iter().map(|(tensor, pointer)| {
        let (about, scalar) = (self::about(tensor), scalar(tensor.dtype, facade));
        let field = field(&tensor.name);
        let pointer = quote!(#facade::typed::#pointer<#scalar>);
        if is_optional(tensor) {
            quote!(#about pub #field: Option<#pointer>,)
        } else {
            quote!(#about pub #field: #pointer,)
        }
    });
    let about = doc(about);
    quote! {
        #about
        #[derive(Clone, Copy, Debug)]
        #[allow(dead_code)]
        #visibility struct #name {
            #before
            #(#fields)*
        }
    }
}

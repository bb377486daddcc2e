//! The layer type.

use crate::GenerateOptions;
use crate::docs::{self, doc};
use crate::names::{Names, field};
use crate::tensors::{of_role, routed};
use crate::types::{array, constant, row};
use moesaic_plan::{LayerPlan, TensorPlan, TensorRole};
use moesaic_spec::LayerSpec;
use proc_macro2::{Literal, TokenStream};
use quote::{format_ident, quote};

/// Returns the layer type with its constants, constructors and calls.
pub(crate) fn layer(plan: &LayerPlan, names: &Names, options: &GenerateOptions) -> TokenStream {
    let Names {
        layer,
        visibility,
        facade,
        ..
    } = names;
    let attributes = &options.attributes;
    let about = if attributes
        .iter()
        .any(|attribute| attribute.path().is_ident("doc"))
    {
        format!("\n{}", docs::layer(&plan.spec))
    } else {
        docs::layer(&plan.spec)
    };
    let about = doc(&about);
    let (constants, construct) = (constants(&plan.spec), construct(names));
    let calls = calls(plan, names);
    quote! {
        #(#attributes)*
        #about
        #[allow(dead_code)]
        #visibility struct #layer {
            layer: #facade::Layer,
        }

        const _: () = #facade::typed::generated::check_format(4);

        #[allow(dead_code)]
        impl #layer {
            #constants
            #construct
            #calls
        }
    }
}

fn constants(spec: &LayerSpec) -> TokenStream {
    let shape = &spec.shape;
    let sizes = [
        ("MODEL_DIM", shape.model_dim, "Width of a token."),
        ("HIDDEN_DIM", shape.hidden_dim, "Width inside an expert."),
        ("OUTPUT_DIM", spec.output_dim(), "Width of the result."),
        ("EXPERTS", shape.experts, "Experts with weights."),
        (
            "ROUTED_EXPERTS",
            spec.routed_experts(),
            "Experts the router scores.",
        ),
        (
            "SHARED_EXPERTS",
            spec.shared.len(),
            "Experts that every token visits.",
        ),
        ("TOP_K", shape.top_k, "Experts per token."),
    ];
    let sizes = sizes.map(|(name, value, about)| {
        let (name, value) = (format_ident!("{name}"), Literal::usize_unsuffixed(value));
        let about = doc(about);
        quote!(#about pub const #name: usize = #value;)
    });
    let toml = spec.to_toml();
    quote! {
        #(#sizes)*

        /// The spec as canonical TOML.
        pub const SPEC: &'static str = #toml;
    }
}

fn construct(names: &Names) -> TokenStream {
    let Names {
        weights, facade, ..
    } = names;
    quote! {
        /// Returns the spec that this type was generated from.
        pub fn spec() -> #facade::LayerSpec {
            #facade::typed::generated::spec(Self::SPEC)
        }

        /// Copies the weights to the engine's device and prepares the kernels, from the cache or by
        /// compiling them.
        ///
        /// # Errors
        /// If a kernel cannot be fetched or compiled, or device memory runs out.
        pub fn new(
            engine: &#facade::Engine,
            weights: &#weights<'_>,
        ) -> ::std::result::Result<Self, #facade::EngineError> {
            Self::made(engine, None, &weights.named(), None)
        }

        /// Makes this rank's part of a layer over ranks, as `new` does. Its calls take this rank's
        /// tokens and return results for them. All ranks of the mesh make each call in the same
        /// order, even ranks without tokens. `weights` are those of the whole layer.
        ///
        /// # Errors
        /// As `new`, or if the layer does not fit the mesh, or ranks make different layers.
        pub fn new_over(
            engine: &#facade::Engine,
            mesh: &#facade::Mesh,
            weights: &#weights<'_>,
        ) -> ::std::result::Result<Self, #facade::EngineError> {
            Self::made(engine, Some(mesh), &weights.named(), None)
        }

        /// Makes the layer as `new` does, from weights by canonical name, as a checkpoint has them.
        /// Their shapes are checked here.
        ///
        /// # Errors
        /// As `new`, or if a tensor is missing or does not match the spec.
        pub fn from_named(
            engine: &#facade::Engine,
            weights: &dyn #facade::WeightSource,
        ) -> ::std::result::Result<Self, #facade::EngineError> {
            Self::made(engine, None, weights, None)
        }

        /// Makes this rank's part as `new_over` does, from weights by canonical name. It reads only
        /// this rank's experts.
        ///
        /// # Errors
        /// As `from_named` and `new_over`.
        pub fn from_named_over(
            engine: &#facade::Engine,
            mesh: &#facade::Mesh,
            weights: &dyn #facade::WeightSource,
        ) -> ::std::result::Result<Self, #facade::EngineError> {
            Self::made(engine, Some(mesh), weights, None)
        }

        fn made(
            engine: &#facade::Engine,
            mesh: Option<&#facade::Mesh>,
            weights: &dyn #facade::WeightSource,
            training: Option<#facade::Training>,
        ) -> ::std::result::Result<Self, #facade::EngineError> {
            let options = #facade::LayerOptions {
                mesh,
                training,
                ..#facade::LayerOptions::default()
            };
            let layer = engine.layer_with(&Self::spec(), weights, options)?;
            Ok(Self { layer })
        }
    }
}

fn calls(plan: &LayerPlan, names: &Names) -> TokenStream {
    let Names { output, facade, .. } = names;
    let inputs: Vec<&TensorPlan> = of_role(plan, TensorRole::Input).collect();
    let Arguments { params, fields } = arguments(&inputs, names);
    let about = doc(&inputs_doc(&inputs));
    let at_factor = plan.spec.capacity.has_factor().then(|| {
        quote! {
            /// Evaluates the layer as `forward_all` does, with a capacity factor for this call
            /// alone.
            ///
            /// # Errors
            /// As `forward`, or if the factor is not finite or too large.
            pub fn forward_at(
                &self,
                capacity_factor: f64,
                #(#params),*
            ) -> ::std::result::Result<#output, #facade::EngineError> {
                let input = Self::input(#fields).with_capacity_factor(capacity_factor);
                let output = self.layer.forward(input.reading(#output::NAMES))?;
                #output::read(&output)
            }
        }
    });
    let route = route(plan, names);
    let y = plan
        .tensor("y")
        .and_then(|y| row(y.dtype, &y.shape, facade));
    let input = input(&inputs, names, "input");
    quote! {
        /// Evaluates the layer, one row per token, and reads back `y`. It draws no random numbers,
        /// even if the layer was made by `training`.
        ///
        #about
        ///
        /// # Errors
        /// If inputs differ in length or hold ids out of range, memory runs out, or a launch fails.
        pub fn forward(&self, #(#params),*) -> ::std::result::Result<Vec<#y>, #facade::EngineError> {
            let output = self.layer.forward(&Self::input(#fields))?;
            #facade::typed::generated::read_rows(&output, "y")
        }

        /// Evaluates the layer as `forward` does, and reads back every named output.
        ///
        /// # Errors
        /// As `forward`.
        pub fn forward_all(&self, #(#params),*) -> ::std::result::Result<#output, #facade::EngineError> {
            let output = self.layer.forward(Self::input(#fields).reading(#output::NAMES))?;
            #output::read(&output)
        }

        /// Sets how the ranks of a mesh carry out later calls; a backward pass follows its own
        /// forward pass. All ranks call this with the same strategy.
        ///
        /// # Errors
        /// If the layer was made without a mesh, the mesh or its nodes do not support the strategy,
        /// or ranks choose differently.
        pub fn set_strategy(
            &mut self,
            strategy: #facade::Strategy,
        ) -> ::std::result::Result<(), #facade::EngineError> {
            self.layer.set_strategy(strategy)
        }

        #at_factor
        #route
        #input
    }
}

/// Returns the calls that only route tokens.
fn route(plan: &LayerPlan, names: &Names) -> TokenStream {
    let Names {
        routing, facade, ..
    } = names;
    let inputs: Vec<&TensorPlan> = routed(plan, TensorRole::Input).collect();
    let Arguments { params, fields } = arguments(&inputs, names);
    let about = doc(&inputs_doc(&inputs));
    let input = input(&inputs, names, "routing_input");
    quote! {
        /// Routes tokens to experts as `forward` does, and computes nothing else.
        ///
        #about
        ///
        /// # Errors
        /// As `forward`.
        pub fn route(&self, #(#params),*) -> ::std::result::Result<#routing, #facade::EngineError> {
            let input = Self::routing_input(#fields);
            #routing::read(&self.layer.route(input.reading(#routing::NAMES))?)
        }

        /// Routes tokens to experts as `forward_train` does with the same RNG key, and computes
        /// nothing else.
        ///
        /// # Errors
        /// As `forward`, or if the layer was not made by `training`.
        pub fn route_train(
            &self,
            #(#params,)*
            rng_key: #facade::RngKey,
        ) -> ::std::result::Result<#routing, #facade::EngineError> {
            let input = Self::routing_input(#fields);
            let call = input.reading(#routing::NAMES).in_training(rng_key);
            #routing::read(&self.layer.route(call)?)
        }

        #input
    }
}

/// The inputs of a call, as its parameters and as the arguments it passes on.
struct Arguments {
    params: Vec<TokenStream>,
    fields: TokenStream,
}

fn arguments(inputs: &[&TensorPlan], names: &Names) -> Arguments {
    let fields = inputs.iter().map(|tensor| field(&tensor.name));
    Arguments {
        params: inputs.iter().map(|tensor| param(tensor, names)).collect(),
        fields: quote!(#(#fields),*),
    }
}

pub(crate) fn inputs_doc(inputs: &[&TensorPlan]) -> String {
    let line = |tensor: &&TensorPlan| {
        format!(
            "* {}: {}",
            docs::tensor(tensor),
            docs::meaning(&tensor.name).to_lowercase()
        )
    };
    inputs.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// Returns a parameter such as `x: &[[f32; 64]]`.
pub(crate) fn param(tensor: &TensorPlan, names: &Names) -> TokenStream {
    let (name, ty) = (field(&tensor.name), input_type(tensor, names));
    quote!(#name: &#ty)
}

/// Returns the type of an input: rows, or one array if the token count does not matter.
fn input_type(tensor: &TensorPlan, names: &Names) -> TokenStream {
    match row(tensor.dtype, &tensor.shape, &names.facade) {
        Some(row) => quote!([#row]),
        None => array(
            tensor.dtype,
            &constant(&tensor.shape).unwrap_or_default(),
            &names.facade,
        ),
    }
}

/// Returns the function that turns typed inputs into an engine's input.
pub(crate) fn input(inputs: &[&TensorPlan], names: &Names, function: &str) -> TokenStream {
    let function = format_ident!("{function}");
    let facade = &names.facade;
    let by_token = |tensor: &&&TensorPlan| row(tensor.dtype, &tensor.shape, facade).is_some();
    let first = inputs.iter().find(by_token).expect("a call has tokens");
    let tokens = field(&first.name);
    let params = inputs.iter().map(|tensor| {
        let (name, ty) = (field(&tensor.name), input_type(tensor, names));
        quote!(#name: &'a #ty)
    });
    let pairs = inputs.iter().map(|tensor| {
        let (name, field) = (&tensor.name, field(&tensor.name));
        match row(tensor.dtype, &tensor.shape, facade) {
            Some(_) => quote!((#name, #facade::typed::generated::host_rows(#field))),
            None => quote!((#name, #facade::typed::generated::host_tensor(#field))),
        }
    });
    quote! {
        fn #function<'a>(#(#params),*) -> #facade::Input<'a> {
            #facade::typed::generated::input(#tokens.len(), [#(#pairs),*])
        }
    }
}

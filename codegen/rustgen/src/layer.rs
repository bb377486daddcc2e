//! The layer type.

use crate::GenerateOptions;
use crate::docs::{self, doc};
use crate::names::{Names, field};
use crate::tensors::{of_role, routed};
use crate::types::{array, constant, row};
use moesaic_plan::{LayerPlan, Role, TensorPlan};
use moesaic_spec::LayerSpec;
use proc_macro2::{Literal, TokenStream};
use quote::{format_ident, quote};

/// The layer type with its constants, constructors and calls.
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
            layer: #facade::AnyLayer,
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
        /// The spec this type was generated from.
        pub fn spec() -> #facade::LayerSpec {
            #facade::typed::generated::spec(Self::SPEC)
        }

        /// Puts the weights on the engine's device and gets the kernels ready:
        /// from the cache, or compiled.
        ///
        /// # Errors
        /// When a kernel cannot be had, or device memory runs out.
        pub fn new(
            engine: &#facade::Engine,
            weights: &#weights<'_>,
        ) -> ::std::result::Result<Self, #facade::EngineError> {
            Self::made(engine, None, &weights.named(), None)
        }

        /// As `new`, this rank's part of a layer over ranks: its calls take and give
        /// what is of this rank's tokens, and are made by all ranks of the mesh, in
        /// the same order, also by those without tokens. `weights` are those of the
        /// whole layer.
        ///
        /// # Errors
        /// As `new`; also when the layer cannot have the mesh, or ranks make
        /// different layers.
        pub fn new_over(
            engine: &#facade::Engine,
            mesh: &#facade::Mesh,
            weights: &#weights<'_>,
        ) -> ::std::result::Result<Self, #facade::EngineError> {
            Self::made(engine, Some(mesh), &weights.named(), None)
        }

        /// As `new`, with weights by canonical name, as a checkpoint has them:
        /// their shapes are checked here.
        ///
        /// # Errors
        /// As `new`; also when a tensor is missing or is not as the spec says.
        pub fn from_named(
            engine: &#facade::Engine,
            weights: &dyn #facade::WeightSource,
        ) -> ::std::result::Result<Self, #facade::EngineError> {
            Self::made(engine, None, weights, None)
        }

        /// As `new_over`, with weights by canonical name. Of experts only those of
        /// this rank are read.
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
            let layer = engine.any_layer(mesh, &Self::spec(), weights, training)?;
            Ok(Self { layer })
        }
    }
}

fn calls(plan: &LayerPlan, names: &Names) -> TokenStream {
    let Names { output, facade, .. } = names;
    let inputs: Vec<&TensorPlan> = of_role(plan, Role::Input).collect();
    let Arguments { params, fields } = arguments(&inputs, names);
    let about = doc(&inputs_doc(&inputs));
    let at_factor = plan.spec.capacity.has_factor().then(|| {
        quote! {
            /// As `forward_all`, with a capacity factor of this call's own.
            ///
            /// # Errors
            /// As `forward`; also for a factor that is no number or too large.
            pub fn forward_at(
                &self,
                capacity_factor: f64,
                #(#params),*
            ) -> ::std::result::Result<#output, #facade::EngineError> {
                let input = Self::input(#fields).with_capacity_factor(capacity_factor);
                let output = self.layer.forward_with(&input, #output::NAMES)?;
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
        /// Evaluates the layer, one row per token, and reads back `y`. Nothing
        /// is drawn, also where the layer was made by `training`.
        ///
        #about
        ///
        /// # Errors
        /// When inputs differ in length or hold ids out of range, memory runs
        /// out, or a launch fails.
        pub fn forward(&self, #(#params),*) -> ::std::result::Result<Vec<#y>, #facade::EngineError> {
            let output = self.layer.forward(&Self::input(#fields))?;
            #facade::typed::generated::read_rows(&output, "y")
        }

        /// As `forward`, and reads back everything the layer can tell.
        ///
        /// # Errors
        /// As `forward`.
        pub fn forward_all(&self, #(#params),*) -> ::std::result::Result<#output, #facade::EngineError> {
            let output = self.layer.forward_with(&Self::input(#fields), #output::NAMES)?;
            #output::read(&output)
        }

        /// Chooses how the ranks of a mesh carry out calls from now on; a backward pass
        /// goes as its forward pass did. All ranks call it, and choose the same.
        ///
        /// # Errors
        /// When the layer was made without a mesh, the mesh or its nodes cannot do it, or
        /// ranks choose differently.
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

/// The calls that only decide where tokens go.
fn route(plan: &LayerPlan, names: &Names) -> TokenStream {
    let Names {
        routing, facade, ..
    } = names;
    let inputs: Vec<&TensorPlan> = routed(plan, Role::Input).collect();
    let Arguments { params, fields } = arguments(&inputs, names);
    let about = doc(&inputs_doc(&inputs));
    let input = input(&inputs, names, "routing_input");
    quote! {
        /// Decides where tokens go as `forward` does, and nothing else.
        ///
        #about
        ///
        /// # Errors
        /// As `forward`.
        pub fn route(&self, #(#params),*) -> ::std::result::Result<#routing, #facade::EngineError> {
            let input = Self::routing_input(#fields);
            #routing::read(&self.layer.route(&input, #routing::NAMES)?)
        }

        /// Decides where tokens go as `forward_train` does with the same
        /// RNG key, and nothing else.
        ///
        /// # Errors
        /// As `forward`; also when the layer was not made by `training`.
        pub fn route_train(
            &self,
            #(#params,)*
            rng_key: #facade::RngKey,
        ) -> ::std::result::Result<#routing, #facade::EngineError> {
            let input = Self::routing_input(#fields);
            #routing::read(&self.layer.route_train(&input, #routing::NAMES, rng_key)?)
        }

        #input
    }
}

/// Inputs as the parameters of a call, and as what it hands on.
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

/// `x: &[[f32; 64]]`.
pub(crate) fn param(tensor: &TensorPlan, names: &Names) -> TokenStream {
    let (name, ty) = (field(&tensor.name), input_type(tensor, names));
    quote!(#name: &#ty)
}

/// Rows, or one array where the token count does not matter.
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

/// The function that makes an engine's input of typed ones.
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

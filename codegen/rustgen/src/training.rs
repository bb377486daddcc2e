//! Training: forward calls that keep state for backward, and backward calls.

use crate::docs::{self, doc};
use crate::layer::{input, inputs_doc, param};
use crate::names::{Names, field};
use crate::tensors::{about, losses, of_role, output_type};
use crate::types::row;
use moesaic_kernel::DType;
use moesaic_plan::{LayerPlan, TensorPlan, TensorRole};
use proc_macro2::TokenStream;
use quote::quote;

/// Returns all items of a layer that only training needs. `plan` runs backward.
pub(crate) fn training(plan: &LayerPlan, names: &Names) -> TokenStream {
    let structs = [
        trained(plan, names),
        input_gradients(plan, names),
        weight_gradients(plan, names),
    ];
    let (construct, calls) = (construct(names), calls(plan, names));
    let layer = &names.layer;
    quote! {
        #(#structs)*

        #[allow(dead_code, clippy::too_many_arguments)]
        impl #layer {
            #construct
            #calls
        }
    }
}

fn trained(plan: &LayerPlan, names: &Names) -> TokenStream {
    let Names {
        trained,
        output,
        layer,
        visibility,
        facade,
        ..
    } = names;
    let fields = losses(plan).map(|tensor| {
        let (field, about) = (field(&tensor.name), about(tensor));
        quote!(#about pub #field: f32,)
    });
    let about = doc(&format!(
        "The results of a forward pass of [`{layer}`] in training."
    ));
    quote! {
        #about
        #[allow(dead_code)]
        #visibility struct #trained {
            /// The results of the call, as in evaluation.
            pub output: #output,
            #(#fields)*
            /// The state for backward.
            pub saved: #facade::Saved,
        }
    }
}

fn input_gradients(plan: &LayerPlan, names: &Names) -> TokenStream {
    let Names {
        input_gradients,
        layer,
        visibility,
        facade,
        ..
    } = names;
    let list: Vec<&TensorPlan> = of_role(plan, TensorRole::InputGradient).collect();
    let fields = list.iter().map(|tensor| {
        let (field, ty) = (field(&tensor.name), output_type(tensor, names));
        let about = about(tensor);
        quote!(#about pub #field: #ty,)
    });
    let reads = list.iter().map(|tensor| {
        let (name, field) = (&tensor.name, field(&tensor.name));
        quote!(#field: #facade::typed::generated::read_rows(output, #name)?,)
    });
    let about = doc(&format!(
        "The results of a backward pass of [`{layer}`]; gradients of weights stay in the layer."
    ));
    quote! {
        #about
        #[derive(Clone, Debug, PartialEq)]
        #[allow(dead_code)]
        #visibility struct #input_gradients { #(#fields)* }

        impl #input_gradients {
            fn read(output: &#facade::Output) -> ::std::result::Result<Self, #facade::EngineError> {
                Ok(#input_gradients { #(#reads)* })
            }
        }
    }
}

fn weight_gradients(plan: &LayerPlan, names: &Names) -> TokenStream {
    let Names {
        gradients,
        layer,
        visibility,
        ..
    } = names;
    let fields = of_role(plan, TensorRole::WeightGradient).map(|tensor| {
        let name = weight_name(tensor);
        let widened = match tensor.dtype {
            DType::F32 => "",
            _ => ", widened to f32",
        };
        let about = doc(&format!("{}{widened}.", docs::tensor(tensor)));
        let field = field(name);
        quote!(#about pub #field: Vec<f32>,)
    });
    let about = doc(&format!(
        "Gradients of the weights of [`{layer}`], row major, as accumulated by backward passes."
    ));
    quote! {
        #about
        #[derive(Clone, Debug, PartialEq)]
        #[allow(dead_code)]
        #visibility struct #gradients { #(#fields)* }
    }
}

/// Returns `router.weight` for `grad.router.weight`.
fn weight_name(tensor: &TensorPlan) -> &str {
    tensor.name.strip_prefix("grad.").unwrap_or(&tensor.name)
}

fn construct(names: &Names) -> TokenStream {
    let Names {
        weights, facade, ..
    } = names;
    quote! {
        /// Makes a layer as `new` does, with a backward pass.
        ///
        /// # Errors
        /// As `new`.
        pub fn training(
            engine: &#facade::Engine,
            weights: &#weights<'_>,
            training: #facade::Training,
        ) -> ::std::result::Result<Self, #facade::EngineError> {
            Self::made(engine, None, &weights.named(), Some(training))
        }

        /// Makes this rank's part as `new_over` does, with a backward pass.
        ///
        /// # Errors
        /// As `new_over`.
        pub fn training_over(
            engine: &#facade::Engine,
            mesh: &#facade::Mesh,
            weights: &#weights<'_>,
            training: #facade::Training,
        ) -> ::std::result::Result<Self, #facade::EngineError> {
            Self::made(engine, Some(mesh), &weights.named(), Some(training))
        }

        /// Makes a layer as `training` does, from weights by canonical name. On a mesh it reads
        /// only this rank's experts.
        ///
        /// # Errors
        /// As `from_named` and `from_named_over`.
        pub fn training_from_named(
            engine: &#facade::Engine,
            mesh: Option<&#facade::Mesh>,
            weights: &dyn #facade::WeightSource,
            training: #facade::Training,
        ) -> ::std::result::Result<Self, #facade::EngineError> {
            Self::made(engine, mesh, weights, Some(training))
        }
    }
}

fn calls(plan: &LayerPlan, names: &Names) -> TokenStream {
    let Names {
        trained,
        output,
        input_gradients,
        gradients,
        facade,
        ..
    } = names;
    let inputs: Vec<&TensorPlan> = of_role(plan, TensorRole::Input).collect();
    let params: Vec<TokenStream> = inputs.iter().map(|tensor| param(tensor, names)).collect();
    let fields = inputs.iter().map(|tensor| field(&tensor.name));
    let fields = quote!(#(#fields),*);
    let about = doc(&inputs_doc(&inputs));
    let at_factor = plan.spec.capacity.has_factor().then(|| {
        quote! {
            /// Runs the layer as `forward_train` does, with a capacity factor for this call alone.
            ///
            /// # Errors
            /// As `forward_train`, or if the factor is not finite or too large.
            pub fn forward_train_at(
                &self,
                capacity_factor: f64,
                #(#params,)*
                rng_key: #facade::RngKey,
            ) -> ::std::result::Result<#trained, #facade::EngineError> {
                let input = Self::training_input(#fields);
                self.train(&input.with_capacity_factor(capacity_factor), rng_key)
            }
        }
    });
    let loss_names: Vec<&String> = losses(plan).map(|tensor| &tensor.name).collect();
    let loss_reads = losses(plan).map(|tensor| {
        let (name, field) = (&tensor.name, field(&tensor.name));
        quote!(#field: #facade::typed::generated::read(&output, #name)?,)
    });
    let dy = plan.tensor("dy");
    let dy = dy.and_then(|dy| row(dy.dtype, &dy.shape, facade));
    let reads = of_role(plan, TensorRole::WeightGradient).map(|tensor| {
        let name = weight_name(tensor);
        let field = field(name);
        quote!(#field: self.layer.gradient(#name)?.to_f32(),)
    });
    let input = input(&inputs, names, "training_input");
    quote! {
        /// Runs the layer forward as in training, and keeps the state for backward. Random numbers
        /// depend on `rng_key` alone.
        ///
        #about
        ///
        /// # Errors
        /// As `forward`, or if the layer was not made by `training`.
        pub fn forward_train(
            &self,
            #(#params,)*
            rng_key: #facade::RngKey,
        ) -> ::std::result::Result<#trained, #facade::EngineError> {
            self.train(&Self::training_input(#fields), rng_key)
        }

        #at_factor

        fn train(
            &self,
            input: &#facade::Input<'_>,
            rng_key: #facade::RngKey,
        ) -> ::std::result::Result<#trained, #facade::EngineError> {
            let names = [#output::NAMES, &[#(#loss_names),*]].concat();
            let (output, saved) = self.layer.forward_train(input.reading(&names), rng_key)?;
            Ok(#trained {
                output: #output::read(&output)?,
                #(#loss_reads)*
                saved,
            })
        }

        /// Runs the layer backward from the gradient of `y`. Gradients of weights stay with the
        /// layer: this pass overwrites them, or adds to them if `accumulate` is set.
        ///
        /// # Errors
        /// If `dy` does not have one row per token, `saved` belongs to another layer, memory runs
        /// out, or a launch fails.
        pub fn backward(
            &self,
            saved: &#facade::Saved,
            dy: &[#dy],
            accumulate: bool,
        ) -> ::std::result::Result<#input_gradients, #facade::EngineError> {
            let dy = #facade::typed::generated::host_rows(dy);
            #input_gradients::read(&self.layer.backward(saved, &dy, accumulate)?)
        }

        /// Sums the gradients of weights over the ranks of a mesh that hold the same weights. Does
        /// nothing without a mesh.
        ///
        /// # Errors
        /// If the layer was not made by `training`, or ranks cannot be reached.
        pub fn reduce_gradients(&self) -> ::std::result::Result<(), #facade::EngineError> {
            self.layer.reduce_gradients()
        }

        /// Sums gradients as `reduce_gradients` does and divides by the number of ranks, for losses
        /// that are means over each rank's own tokens.
        ///
        /// # Errors
        /// As `reduce_gradients`.
        pub fn average_gradients(&self) -> ::std::result::Result<(), #facade::EngineError> {
            self.layer.average_gradients()
        }

        /// Reads back the gradients of all weights. On a mesh, those of experts cover this rank's
        /// own experts in order, and those of sharded shared experts its shards. All others cover
        /// this rank's tokens until `reduce_gradients` has summed them.
        ///
        /// # Errors
        /// If the layer was not made by `training`.
        pub fn gradients(&self) -> ::std::result::Result<#gradients, #facade::EngineError> {
            Ok(#gradients { #(#reads)* })
        }

        #input
    }
}

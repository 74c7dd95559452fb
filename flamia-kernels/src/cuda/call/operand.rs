//! A tensor that a call quantises.

use flamia_cuda::Stream;

use super::{CallError, CallShape, Kernels, cached};
use crate::cuda::layout::HeadDim;
use crate::cuda::quantise::{
    Forms, Quantisation, QuantiseCall, Quantised, QuantisedLayout, Quantiser,
};
use crate::cuda::retile::{Image, Retiler, Retiling};
use crate::cuda::tensor::Scratch;

/// How it is quantised, and where the results lie.
pub(super) struct Operand {
    quantiser: Quantiser,
    pub layout: QuantisedLayout,
    /// For a transposed image that a launch of its own makes from the row image, behind the layout.
    apart: Option<Retiler>,
}

impl Kernels {
    /// In these forms, both images made in one pass over the tensor if that `fuses` them.
    pub(super) fn operand(
        &self,
        shape: &CallShape,
        heads: usize,
        hadamard: bool,
        forms: Forms,
        fuses: bool,
    ) -> Result<Operand, CallError> {
        let is_apart = forms == Forms::Both && !fuses;
        let head_dim = HeadDim::try_from(shape.head_dim)?;
        let quantisation = Quantisation {
            head_dim,
            hadamard,
            forms: if is_apart { Forms::Row } else { forms },
        };
        let quantiser = cached(&self.quantisers, quantisation, || {
            Quantiser::new(&self.gpu, quantisation)
        })?;
        Ok(Operand {
            quantiser,
            layout: quantisation.layout(shape.tokens, shape.documents, heads)?,
            apart: match is_apart {
                true => Some(self.retiler(head_dim, Image::Transposed)?),
                false => None,
            },
        })
    }

    pub(super) fn retiler(&self, head_dim: HeadDim, to: Image) -> Result<Retiler, CallError> {
        let retiling = Retiling { head_dim, to };
        Ok(cached(&self.retilers, retiling, || {
            Retiler::new(&self.gpu, retiling)
        })?)
    }
}

impl Operand {
    /// Bytes of an image.
    pub const fn image_bytes(&self) -> usize {
        self.layout.padded().image_bytes()
    }

    /// Bytes of scratch that it takes.
    pub const fn bytes(&self) -> usize {
        let apart = match self.apart {
            Some(_) => self.image_bytes(),
            None => 0,
        };
        self.layout.bytes() + apart
    }

    /// The addresses in scratch that starts at `address`.
    pub fn at(&self, address: u64) -> Quantised {
        let mut quantised = self.layout.at(address);
        if self.apart.is_some() {
            quantised.transposed_image = Some(address + self.layout.bytes() as u64);
        }
        quantised
    }

    /// Quantises a tensor, and returns where. If it `starts_early`, while another quantiser in front of it is
    /// at its last blocks.
    ///
    /// # Errors
    /// As [`Quantiser::launch`].
    ///
    /// # Safety
    /// As there, and as [`Quantiser::launch_after`]; the tensor has as many rows, documents and heads as
    /// this was made for.
    pub unsafe fn quantise(
        &self,
        stream: Stream<'_>,
        call: &QuantiseCall,
        scratch: Scratch,
        starts_early: bool,
    ) -> Result<Quantised, CallError> {
        scratch.check(call.input.name, self.bytes())?;
        // SAFETY: the caller's word.
        let made = unsafe {
            if starts_early {
                self.quantiser.launch_after(stream, call, scratch)?
            } else {
                self.quantiser.launch(stream, call, scratch)?
            }
        };
        let quantised = self.at(scratch.address);
        if let (Some(retiler), Some(row), Some(transposed)) =
            (&self.apart, made.row_image, quantised.transposed_image)
        {
            // SAFETY: the row image is whole when this begins; behind the layout is room for another.
            unsafe { retiler.launch(stream, row, transposed, self.layout.padded())? };
        }
        Ok(quantised)
    }
}

//! Packed documents and the tiles both attention passes visit.

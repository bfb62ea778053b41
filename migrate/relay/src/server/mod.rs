//! The listening end: accepts links and groups them into sessions, each with its target.
//!
//! A [`Server`] has the sessions in this process. A [`Front`] has each in a process of its own: it
//! opens the sessions and passes their links on, and a `Server` in that process runs the session.

mod config;
mod front;
mod greeting;
mod hello;
mod measure;
mod run;
mod state;
mod waiting;

pub use config::{Host, ServerConfig};
pub use front::{Front, FrontConfig, Switchboard};
pub use state::{Promise, Server};

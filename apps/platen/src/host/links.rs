//! The port for links of other hosts.

use super::settings::Settings;
use super::switchboard::Carriers;
use crate::network;
use crate::relay_options::{delta_cache_default, history_grant};
use crate::say::say;
use anyhow::Context;
use relay::{Front, FrontConfig};
use session::Grants;
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::thread::JoinHandle;
use tls::Acceptor;

/// The listening socket, and the thread that accepts there.
pub(super) struct Links {
    listener: TcpListener,
    pub(super) address: SocketAddr,
    carriers: Arc<Carriers>,
    /// Rises while the thread accepts.
    beat: Arc<AtomicU64>,
    /// Whether the listening socket has failed.
    broken: Arc<AtomicBool>,
    current: Option<Current>,
    /// Connections that earlier fronts have turned away.
    turned_away_before: u64,
}

struct Current {
    front: Arc<Front>,
    over: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

impl Links {
    /// Listens at this host's address.
    pub(super) fn listen(settings: &Settings, carriers: Arc<Carriers>) -> anyhow::Result<Self> {
        let port = settings.config.port;
        let addresses = match settings.me().listen {
            Some(address) => vec![SocketAddr::new(address, port)],
            None => network::all_at(port).into(),
        };
        let listener = network::bind(&addresses)
            .with_context(|| format!("cannot listen on port {port} for other hosts"))?;
        Ok(Self {
            address: listener.local_addr()?,
            listener,
            carriers,
            beat: Arc::default(),
            broken: Arc::default(),
            current: None,
            turned_away_before: 0,
        })
    }

    /// Accepts with these certificates from now on. Connections that were accepted before continue
    /// with the former ones.
    pub(super) fn serve(&mut self, acceptor: Acceptor, page_size: u32) -> anyhow::Result<()> {
        let config = FrontConfig {
            acceptor,
            page_size,
            grants: Grants::default(),
            delta_cache: delta_cache_default(),
            history: history_grant(),
        };
        let (front, over) =
            (Front::new(config, self.carriers.clone()), Arc::new(AtomicBool::new(false)));
        let listener = self.listener.try_clone().context("the port for other hosts")?;
        self.stop();
        let (accepting, ending) = (front.clone(), over.clone());
        let (beat, broken) = (self.beat.clone(), self.broken.clone());
        let accept = move || {
            let go_on = || {
                beat.fetch_add(1, Ordering::Relaxed);
                !ending.load(Ordering::Acquire)
            };
            if let Err(error) = accepting.run(&listener, go_on) {
                say(&format!("{:#}", anyhow::Error::from(error)));
                broken.store(true, Ordering::Release);
            }
        };
        let thread = std::thread::Builder::new().name("links".into()).spawn(accept);
        // Without it the service takes no links: it ends, and its manager starts it again.
        let thread = thread.inspect_err(|_| self.broken.store(true, Ordering::Release))?;
        self.current = Some(Current { front, over, thread });
        Ok(())
    }

    /// Ends the thread that accepts, within 200 ms.
    fn stop(&mut self) {
        let Some(Current { front, over, thread }) = self.current.take() else { return };
        over.store(true, Ordering::Release);
        // The panic handler has reported a panic.
        let _ = thread.join();
        self.turned_away_before += front.strangers();
    }

    /// Whether no link can be accepted any more.
    pub(super) fn are_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }

    /// A number that rises while links are accepted.
    pub(super) fn beats(&self) -> u64 {
        self.beat.load(Ordering::Relaxed)
    }

    /// Number of connections that were turned away.
    pub(super) fn turned_away(&self) -> u64 {
        let now = self.current.as_ref().map_or(0, |current| current.front.strangers());
        self.turned_away_before + now
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        self.stop();
    }
}

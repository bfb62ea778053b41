//! A store's dictionaries in digested form: all threads read with any of them, and write with the
//! newest.
//!
//! All memory is allocated with the device. A dictionary that is installed later is digested into
//! this memory by the installing thread. Writers see it by one atomic load; the older dictionary
//! stays valid.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use codec::{Codec, Dictionary, Settings};
use store::{DictionaryError, Store, DICTIONARIES, DICTIONARY_TAG, MAX_DICTIONARY};

/// The dictionaries of one store, shared by all threads that read or write.
#[derive(Debug)]
pub struct Dictionaries {
    /// By place. An empty place cannot be read: its dictionary is damaged, or was never installed.
    there: [OnceLock<Arc<Dictionary>>; DICTIONARIES],
    /// The place of the newest dictionary, plus one; 0 for none.
    newest: AtomicUsize,
    /// Memory for dictionaries installed later.
    rooms: Mutex<Vec<Arc<Dictionary>>>,
}

impl Dictionaries {
    /// The dictionaries of this store. The first call decides how they are used: if `settings` are
    /// of zstd, pages are written with them, and `more` allocates memory for later ones.
    pub(crate) fn of(store: &Store, settings: Option<Settings>, more: bool) -> Arc<Self> {
        let made = store.beside(|| Arc::new(Self::new(store, settings, more)));
        // No other type is ever stored there.
        made.unwrap_or_else(|| Arc::new(Self::new(store, settings, false)))
    }

    fn new(store: &Store, settings: Option<Settings>, more: bool) -> Self {
        let level = settings.filter(|of| of.codec() == Codec::Zstd).map(|of| of.level());
        let this = Self {
            there: [const { OnceLock::new() }; DICTIONARIES],
            newest: AtomicUsize::new(0),
            rooms: Mutex::new(Vec::with_capacity(DICTIONARIES)),
        };
        let mut bytes = Box::new([0; MAX_DICTIONARY]);
        let taken = store.dictionaries();
        for place in 0..taken {
            let mut dictionary = Dictionary::room(level);
            let Ok(found) = store.dictionary(place, &mut bytes) else { continue };
            if dictionary.digest(&bytes[..found.len]).is_ok() {
                let _ = this.there[place].set(Arc::new(dictionary));
                this.newest.store(place + 1, Ordering::Release);
            }
        }
        if more && level.is_some() {
            let rooms = (taken..DICTIONARIES).map(|_| Arc::new(Dictionary::room(level)));
            this.lock().extend(rooms);
        }
        this
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Arc<Dictionary>>> {
        // A panic under this lock interrupts no update.
        self.rooms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The dictionary at this place.
    #[inline]
    pub fn at(&self, place: usize) -> Option<&Arc<Dictionary>> {
        self.there.get(place)?.get()
    }

    /// The tag and the dictionary of new writes, if there is one.
    #[inline]
    pub fn newest(&self) -> Option<(u8, &Arc<Dictionary>)> {
        // Pairs with the Release in `install`.
        let place = self.newest.load(Ordering::Acquire).checked_sub(1)?;
        let tag = DICTIONARY_TAG + u8::try_from(place).expect("a few");
        Some((tag, self.at(place)?))
    }

    /// How many dictionaries may still be installed.
    pub fn rooms(&self) -> usize {
        self.lock().len()
    }

    /// Whether pages are written with a dictionary, or may be later.
    pub(crate) fn may_be(&self) -> bool {
        self.newest().is_some() || self.rooms() > 0
    }

    /// Bytes of memory of digested dictionaries, including room for later ones.
    pub fn memory(&self) -> usize {
        let there = self.there.iter().filter_map(OnceLock::get).map(|one| one.memory());
        there.sum::<usize>() + self.lock().iter().map(|one| one.memory()).sum::<usize>()
    }

    /// Takes memory in which a dictionary can be tried; `None` if none is left. The caller has to
    /// [`install`](Self::install) the dictionary or to [`give_back`](Self::give_back) the memory.
    pub fn take_room(&self) -> Option<Arc<Dictionary>> {
        self.lock().pop()
    }

    /// Takes back unused room. The room is lost if another reference to it exists.
    pub fn give_back(&self, mut room: Arc<Dictionary>) {
        if let Some(empty) = Arc::get_mut(&mut room) {
            empty.clear();
            self.lock().push(room);
        }
    }

    /// Installs a dictionary, which is never removed; pages are written with it from now on.
    /// `digested` must be made from `bytes`.
    ///
    /// # Errors
    ///
    /// The store's: it has no place or no memory for the dictionary. Then `digested` is given back.
    pub fn install(
        &self,
        store: &Store,
        digested: Arc<Dictionary>,
        bytes: &[u8],
        gain: u64,
    ) -> Result<usize, DictionaryError> {
        let place = match store.install_dictionary(bytes, gain) {
            Ok(place) => place,
            Err(error) => {
                self.give_back(digested);
                return Err(error);
            }
        };
        // The store never returns a place twice.
        let _ = self.there[place].set(digested);
        self.newest.store(place + 1, Ordering::Release);
        Ok(place)
    }
}

//! Tokens that are known beforehand.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::future;
use std::time::Duration;

use ring::hmac;
use ring::rand::SystemRandom;
use serde_json::{Map, Value as Json};

use super::{Session, TokenValidator, Validation};

/// Tokens that are known beforehand, and whose they are.
///
/// They are kept and found by a hash under a key that is made anew for every list, so that the time that a look-up takes says
/// nothing about the tokens in it, and neither does its memory.
pub struct StaticTokens {
    key: hmac::Key,
    tokens: HashMap<[u8; 32], StaticToken>,
}

/// Whose a token is.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct StaticToken {
    /// Who has it.
    pub user_id: String,
    /// In which roles. Default: none.
    pub roles: Vec<String>,
    /// What else is known of them. Default: nothing.
    pub metadata: Map<String, Json>,
    /// Until when it is good. Default: for ever.
    pub expiry: TokenExpiry,
}

/// Until when a token is good.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum TokenExpiry {
    /// For ever.
    #[default]
    Never,
    /// Until then, in milliseconds since 1970.
    At(u64),
    /// For so long from each login: the session ends, and the token is good for another one.
    After(Duration),
}

/// What is wrong with a list of tokens. It names users, and never a token.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StaticTokensError {
    /// A token has no text, so that anybody has it.
    #[error("the token of {user_id:?} is empty")]
    EmptyToken {
        /// Whose it is.
        user_id: String,
    },
    /// A token is nobody's.
    #[error("token {place} of the list has no user id")]
    NoUser {
        /// Which one, counted from 1.
        place: usize,
    },
    /// A token is there twice.
    #[error("the token of {user_id:?} is also that of {other:?}: each needs its own")]
    Twice {
        /// Whose it is.
        user_id: String,
        /// Whose it is, too.
        other: String,
    },
    /// The system has no random numbers for the key.
    #[error("the system gives no random numbers")]
    NoRandomness,
}

impl StaticTokens {
    /// These tokens, and whose they are.
    pub fn new(tokens: impl IntoIterator<Item = (impl AsRef<str>, StaticToken)>) -> Result<Self, StaticTokensError> {
        let key = hmac::Key::generate(hmac::HMAC_SHA256, &SystemRandom::new());
        let mut own = Self { key: key.map_err(|_| StaticTokensError::NoRandomness)?, tokens: HashMap::new() };
        for (place, (text, token)) in tokens.into_iter().enumerate() {
            if token.user_id.is_empty() {
                return Err(StaticTokensError::NoUser { place: place + 1 });
            }
            if text.as_ref().is_empty() {
                return Err(StaticTokensError::EmptyToken { user_id: token.user_id });
            }
            match own.tokens.entry(digest(&own.key, text.as_ref())) {
                Entry::Vacant(entry) => drop(entry.insert(token)),
                Entry::Occupied(entry) => {
                    return Err(StaticTokensError::Twice {
                        user_id: token.user_id,
                        other: entry.get().user_id.clone(),
                    });
                }
            }
        }
        Ok(own)
    }

    fn session(&self, token: &str, now: u64) -> Option<Session> {
        let session = self.tokens.get(&digest(&self.key, token))?.session(now);
        (!session.is_expired(now)).then_some(session)
    }
}

impl TokenValidator for StaticTokens {
    fn validate<'a>(&'a self, token: &'a str, now: u64) -> Validation<'a> {
        Box::pin(future::ready(Ok(self.session(token, now))))
    }
}

impl fmt::Debug for StaticTokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StaticTokens").field("count", &self.tokens.len()).finish_non_exhaustive()
    }
}

impl StaticToken {
    /// The token of somebody in these roles, for ever.
    pub fn new(user_id: impl Into<String>, roles: impl IntoIterator<Item = impl Into<String>>) -> Self {
        let roles = roles.into_iter().map(Into::into).collect();
        Self { user_id: user_id.into(), roles, metadata: Map::new(), expiry: TokenExpiry::Never }
    }

    fn session(&self, now: u64) -> Session {
        let mut session = Session::new(&self.user_id, &self.roles);
        session.metadata.clone_from(&self.metadata);
        session.expires_at = match self.expiry {
            TokenExpiry::Never => None,
            TokenExpiry::At(then) => Some(then),
            TokenExpiry::After(span) => Some(now.saturating_add(u64::try_from(span.as_millis()).unwrap_or(u64::MAX))),
        };
        session
    }
}

fn digest(key: &hmac::Key, token: &str) -> [u8; 32] {
    let mut digest = [0; 32];
    digest.copy_from_slice(hmac::sign(key, token.as_bytes()).as_ref());
    digest
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn token(user_id: &str, expiry: TokenExpiry) -> StaticToken {
        let mut token = StaticToken::new(user_id, ["writer"]);
        token.metadata.insert("team".to_owned(), json!(7));
        token.expiry = expiry;
        token
    }

    #[test]
    fn a_token_is_somebodys() {
        let tokens = StaticTokens::new([
            ("t-ann", token("ann", TokenExpiry::Never)),
            ("t-bob", token("bob", TokenExpiry::Never)),
        ]);
        let tokens = tokens.unwrap();
        let session = tokens.session("t-bob", 5).unwrap();
        assert_eq!(
            (&*session.user_id, &session.roles[..], session.expires_at),
            ("bob", &["writer".to_owned()][..], None)
        );
        assert_eq!(session.metadata["team"], 7);
        assert_eq!(tokens.session("t-ann", 5).unwrap().user_id, "ann");
        for unknown in ["", "t-bo", "t-bob ", "T-BOB", "bob"] {
            assert_eq!(tokens.session(unknown, 5), None, "{unknown:?}");
        }
    }

    #[test]
    fn a_token_is_over_at_its_time() {
        let tokens = StaticTokens::new([("t", token("ann", TokenExpiry::At(1000)))]).unwrap();
        assert_eq!(tokens.session("t", 999).unwrap().expires_at, Some(1000));
        assert_eq!(tokens.session("t", 1000), None);
    }

    #[test]
    fn a_span_counts_from_each_login() {
        let expiry = TokenExpiry::After(Duration::from_secs(1));
        let tokens = StaticTokens::new([("t", token("ann", expiry))]).unwrap();
        for now in [0, 500, 5000] {
            assert_eq!(tokens.session("t", now).unwrap().expires_at, Some(now + 1000));
        }
        assert_eq!(tokens.session("t", u64::MAX - 1).unwrap().expires_at, Some(u64::MAX));
        let tokens = StaticTokens::new([("t", token("ann", TokenExpiry::After(Duration::ZERO)))]).unwrap();
        assert_eq!(tokens.session("t", 5), None);
    }

    #[test]
    fn wrong_lists_say_what_is_wrong_and_no_token() {
        let one = |user_id: &str| token(user_id, TokenExpiry::Never);
        for (tokens, error) in [
            (vec![("", one("ann"))], "the token of \"ann\" is empty"),
            (vec![("t-a", one("ann")), ("t-b", one(""))], "token 2 of the list has no user id"),
            (
                vec![("t-a", one("ann")), ("t-a", one("bob"))],
                "the token of \"bob\" is also that of \"ann\": each needs its own",
            ),
        ] {
            assert_eq!(StaticTokens::new(tokens).unwrap_err().to_string(), error);
        }
        let debug = format!("{:?}", StaticTokens::new([("t-secret", one("ann"))]).unwrap());
        assert!(!debug.contains("secret"), "{debug}");
    }

    #[test]
    fn two_lists_keep_a_token_differently() {
        let list = || StaticTokens::new([("t", token("ann", TokenExpiry::Never))]).unwrap();
        assert_ne!(list().tokens.keys().next(), list().tokens.keys().next());
    }
}

//! Static tokens: a fixed list from the configuration.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::future;
use std::time::Duration;

use ring::hmac;
use ring::rand::SystemRandom;
use serde_json::{Map, Value as Json};

use super::{Session, TokenValidator, Validation};

/// A fixed list of tokens and their users.
///
/// Tokens are stored and looked up by an HMAC under a random key, so that neither the time of a lookup nor the memory of the
/// process reveals a token.
pub struct StaticTokens {
    key: hmac::Key,
    tokens: HashMap<[u8; 32], StaticToken>,
}

/// The user of a static token.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct StaticToken {
    /// The user id.
    pub user_id: String,
    /// The roles of the user. Default: none, because access is granted explicitly.
    pub roles: Vec<String>,
    /// Further attributes of the user, for row filters. Default: none.
    pub metadata: Map<String, Json>,
    /// When the token expires. Default: never, because a static token is revoked by removing it.
    pub expiry: TokenExpiry,
}

/// When a static token expires.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum TokenExpiry {
    /// Never.
    #[default]
    Never,
    /// At this time, in milliseconds since 1970.
    At(u64),
    /// Sessions expire this long after their login. The token itself stays valid for further logins.
    After(Duration),
}

/// Why a list of tokens is invalid. Messages name users and never tokens.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StaticTokensError {
    /// A token is the empty string.
    #[error("the token of {user_id:?} is empty")]
    EmptyToken {
        /// The user of the token.
        user_id: String,
    },
    /// A token has no user id.
    #[error("token {number} of the list has no user id")]
    NoUser {
        /// The number of the token, counted from 1.
        number: usize,
    },
    /// Two users have the same token.
    #[error("{user_id:?} and {other:?} have the same token; give each user another one")]
    Duplicate {
        /// The user of the later token.
        user_id: String,
        /// The user of the earlier token.
        other: String,
    },
    /// The system has no random numbers for the key.
    #[error("the random number generator of the system failed")]
    NoRandomness,
}

impl StaticTokens {
    /// Creates a list from pairs of token and user.
    pub fn new(tokens: impl IntoIterator<Item = (impl AsRef<str>, StaticToken)>) -> Result<Self, StaticTokensError> {
        let key = hmac::Key::generate(hmac::HMAC_SHA256, &SystemRandom::new());
        let mut list = Self { key: key.map_err(|_| StaticTokensError::NoRandomness)?, tokens: HashMap::new() };
        for (index, (text, token)) in tokens.into_iter().enumerate() {
            if token.user_id.is_empty() {
                return Err(StaticTokensError::NoUser { number: index + 1 });
            }
            if text.as_ref().is_empty() {
                return Err(StaticTokensError::EmptyToken { user_id: token.user_id });
            }
            match list.tokens.entry(digest(&list.key, text.as_ref())) {
                Entry::Vacant(entry) => drop(entry.insert(token)),
                Entry::Occupied(entry) => {
                    return Err(StaticTokensError::Duplicate {
                        user_id: token.user_id,
                        other: entry.get().user_id.clone(),
                    });
                }
            }
        }
        Ok(list)
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
    /// Creates a token without metadata that never expires.
    pub fn new(user_id: impl Into<String>, roles: impl IntoIterator<Item = impl Into<String>>) -> Self {
        let roles = roles.into_iter().map(Into::into).collect();
        Self { user_id: user_id.into(), roles, metadata: Map::new(), expiry: TokenExpiry::Never }
    }

    fn session(&self, now: u64) -> Session {
        let mut session = Session::new(&self.user_id, &self.roles);
        session.metadata.clone_from(&self.metadata);
        session.expires_at = match self.expiry {
            TokenExpiry::Never => None,
            TokenExpiry::At(time) => Some(time),
            TokenExpiry::After(duration) => {
                Some(now.saturating_add(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)))
            }
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
    fn a_token_identifies_its_user() {
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
    fn a_token_expires_at_its_time() {
        let tokens = StaticTokens::new([("t", token("ann", TokenExpiry::At(1000)))]).unwrap();
        assert_eq!(tokens.session("t", 999).unwrap().expires_at, Some(1000));
        assert_eq!(tokens.session("t", 1000), None);
    }

    #[test]
    fn a_relative_expiry_counts_from_each_login() {
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
    fn errors_name_users_and_no_tokens() {
        let one = |user_id: &str| token(user_id, TokenExpiry::Never);
        for (tokens, error) in [
            (vec![("", one("ann"))], "the token of \"ann\" is empty"),
            (vec![("t-a", one("ann")), ("t-b", one(""))], "token 2 of the list has no user id"),
            (
                vec![("t-a", one("ann")), ("t-a", one("bob"))],
                "\"bob\" and \"ann\" have the same token; give each user another one",
            ),
        ] {
            assert_eq!(StaticTokens::new(tokens).unwrap_err().to_string(), error);
        }
        let debug = format!("{:?}", StaticTokens::new([("t-secret", one("ann"))]).unwrap());
        assert!(!debug.contains("secret"), "{debug}");
    }

    #[test]
    fn two_lists_hash_a_token_differently() {
        let list = || StaticTokens::new([("t", token("ann", TokenExpiry::Never))]).unwrap();
        assert_ne!(list().tokens.keys().next(), list().tokens.keys().next());
    }
}

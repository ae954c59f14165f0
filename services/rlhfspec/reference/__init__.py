"""How likely the policy as it began finds what the policy now says."""
